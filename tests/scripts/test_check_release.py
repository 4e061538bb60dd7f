"""The check of a release, and the workflow that runs it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import check_release

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository whose version, changelog and built files agree."""
    (tmp_path / "diloco").mkdir()
    (tmp_path / "diloco" / "__init__.py").write_text('import os\n\n__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n## 1.2.0 (2026-12-01)\n"
    )
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "archipelago_diloco-1.2.0.tar.gz").touch()
    build(tmp_path, "diloco/py.typed", "archipelago/py.typed")
    return tmp_path


def build(root: Path, *names: str) -> None:
    with zipfile.ZipFile(root / "dist" / "archipelago_diloco-1.2.0-py3-none-any.whl", "w") as wheel:
        for name in (*names, "archipelago_diloco-1.2.0.dist-info/METADATA"):
            wheel.writestr(name, "")


def problems(root: Path, tag: str = "v1.2.0") -> list[str]:
    return [
        *check_release.problems(root, tag),
        *check_release.problems_of_files(root, root / "dist"),
    ]


def test_a_release_that_agrees(root: Path) -> None:
    assert problems(root) == []


def test_another_tag_is_refused(root: Path) -> None:
    assert problems(root, "v1.2.1") == [
        "tag: expected v1.2.0, the version in diloco/__init__.py, found v1.2.1"
    ]


@pytest.mark.parametrize("heading", ["## Unreleased", "## 1.2.0", "## 11.2.0 (2026-12-01)"])
def test_a_changelog_without_the_version_is_refused(root: Path, heading: str) -> None:
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    (found,) = problems(root)
    assert "expected a heading '## 1.2.0 (YYYY-MM-DD)'" in found


def test_a_wheel_with_other_packages_or_without_types_is_refused(root: Path) -> None:
    build(root, "diloco/py.typed", "runs/__init__.py")
    assert problems(root) == [
        "wheel: expected archipelago/py.typed, found none",
        "wheel: expected the packages archipelago, diloco, found also runs",
    ]


def test_other_files_are_refused(root: Path) -> None:
    (root / "dist" / "archipelago_diloco-1.1.0.tar.gz").touch()
    (found,) = problems(root)
    assert "found archipelago_diloco-1.1.0.tar.gz, " in found


def test_the_workflow_is_valid_and_uses_no_stored_token() -> None:
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = WORKFLOW.read_text()
    assert "secrets." not in text and "id-token: write" in text
    for script in re.findall(r"python (scripts/\w+\.py)", text):
        assert (ROOT / script).exists()
