"""The demo targets of the Makefile, run in a copy of the repository with its state in ``var/``.

The copy shares this repository's virtual environment, which ``make`` finds complete, and its
compiled modules. ``ROUNDS`` and ``STEPS`` shorten the demo runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import free_ports

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=3)]

ROOT = Path(__file__).resolve().parent.parent
DATABASE = "var/archipelago.sqlite3"
PATIENCE_S = 1100
"""Below the limit after which ``.ci/run`` ends a test that hangs."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files in the work tree that git does not ignore."""
    tmp_path = tmp_path_factory.mktemp("clone")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, tmp_path / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    if not (tmp_path / ".venv").exists():
        (tmp_path / ".venv").symlink_to((ROOT / ".venv").resolve())
    share_compiled_modules(tmp_path)
    return tmp_path


def share_compiled_modules(clone: Path) -> None:
    """Let Python find the compiled modules of this repository for the files of the copy, which have
    the same times."""
    if sys.pycache_prefix is None:
        return
    compiled = Path(sys.pycache_prefix)
    own, of_clone = (compiled / root.relative_to(root.anchor) for root in (ROOT, clone))
    if own.is_dir():
        of_clone.parent.mkdir(parents=True, exist_ok=True)
        of_clone.symlink_to(own)


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    dropped = ("ARCHIPELAGO_", "DJANGO_", "AWS_", "REDIS_URL", "DATABASE_URL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return subprocess.run(
        ["make", *arguments],
        cwd=clone,
        env={**kept, "ARCHIPELAGO_PORT": str(free_ports(1)[0])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def assert_trains(clone: Path, target: str) -> None:
    # A preemption before the only round delays it by the start of another replica.
    done = make(clone, target, "EXIT=1", "ROUNDS=1", "STEPS=5", "PREEMPT_S=3600")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "run succeeded" in done.stdout


def test_an_invalid_number_of_rounds_is_refused_by_name(clone: Path) -> None:
    done = make(clone, "demo", "EXIT=1", "ROUNDS=none")
    assert done.returncode != 0
    assert "expected a whole number of at least 1, found 'none'" in done.stderr
    assert not (clone / DATABASE).exists()


def test_the_demo_trains_from_an_empty_clone(clone: Path) -> None:
    assert_trains(clone, "demo")
    assert (clone / DATABASE).exists()


def test_the_mixed_demo_trains_in_the_same_state_folder(clone: Path) -> None:
    assert_trains(clone, "demo-mixed")
