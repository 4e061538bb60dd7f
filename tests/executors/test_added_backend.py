"""A backend is one folder, one line of the registry (or an entry point) and one page of docs.

``toy_backend/`` holds a backend as a separate package. With that folder on the path, the backend
passes the contract suite, and forms, API and pages support it without a change.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from executors.registry import BUILT_IN, DESCRIPTIONS
from tests import migrated
from tests.source_texts import files_that_name

ROOT = Path(__file__).parents[2]
TOY = Path(__file__).parent / "toy_backend"
REGISTRY = "executors/registry.py"
PRODUCT = ("archipelago", "dashboard", "executors", "runs", "static/js", "templates")

MENTIONS = {
    "dashboard/views/styleguide.py": "sample rows of the style guide",
    "archipelago/frame_parser.py": "an example in the help of an option",
    "dashboard/presentation/api_commands.py": "examples of commands in the API docs",
    "dashboard/presentation/api_reference.py": "an example value in the API docs",
    "archipelago/documents.py": "a commented example in the template of a document",
    "templates/runs/list.html": "an example in the placeholder of the search field",
}
"""Product files outside a backend's folder that name one in code -> why they can."""

NAMES = tuple(name for name in DESCRIPTIONS if name not in ("local", "huggingface"))
"""``local`` is also a word, and ``huggingface`` also a kind of workload and of bucket."""

NAMED = re.compile(rf"(?<![\w-])({'|'.join(NAMES)})(?![\w-])", re.IGNORECASE)


def run_with_toy(*arguments: str) -> str:
    """Output of a pytest run in a new process where the toy backend is installed."""
    environment = {**os.environ, "PYTHONPATH": str(TOY), "PYTEST_ADDOPTS": ""}
    environment[migrated.VARIABLE] = str(Path(migrated.migrated_database()).parent)
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.processes
@pytest.mark.slow(minutes=1)
def test_an_installed_backend_passes_the_contract_suite(tmp_path: Path) -> None:
    suite = sorted(str(path) for path in (ROOT / "tests/contracts").glob("test_executor*.py"))
    output = run_with_toy(f"--basetemp={tmp_path / 'suite'}", "-k", "nohup", *suite)
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= 30, output


@pytest.mark.processes
@pytest.mark.slow(minutes=1)
def test_form_api_credential_and_pages_support_an_installed_backend(tmp_path: Path) -> None:
    run_with_toy(f"--basetemp={tmp_path / 'pages'}", str(TOY / "check_pages.py"))


def test_an_entry_point_that_cannot_be_loaded_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[archipelago.backends]\nbroken = a_module_that_is_missing:BACKEND\n"
        "modal = executors.local.backend:BACKEND\n"
    )
    code = "from executors.registry import BACKENDS; print(*BACKENDS)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [path.split(".")[1] for path in BUILT_IN]
    assert "cannot load the backend broken" in done.stderr
    assert "entry point modal" in done.stderr


def test_only_the_registry_names_a_backend_outside_its_folder() -> None:
    result = {
        name
        for name in files_that_name(NAMED, PRODUCT)
        if not set(Path(name).parts[1:2]) & set(DESCRIPTIONS)
    }
    assert result - {REGISTRY} <= set(MENTIONS), sorted(result - {REGISTRY} - set(MENTIONS))


def test_backends_do_not_import_each_other() -> None:
    for name in DESCRIPTIONS:
        folder = ROOT / "executors" / name
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += (
                    [each.name for each in node.names] if isinstance(node, ast.Import) else []
                )
                for module in modules:
                    if not module.startswith("executors."):
                        continue
                    part = module.split(".")[1]
                    assert part not in set(DESCRIPTIONS) - {name}, (path, module)
                    assert part not in ("registry", "loading"), (path, module)


@pytest.mark.parametrize("name", list(DESCRIPTIONS))
def test_the_page_of_a_backend_documents_every_option_and_variable(name: str) -> None:
    text = (ROOT / "docs" / "backends" / f"{name}.md").read_text()
    backend = DESCRIPTIONS[name]
    words = [*backend.declared_options, *(variable.name for variable in backend.variables)]
    missing = [word for word in words if f"`{word}`" not in text]
    assert not missing


@pytest.mark.parametrize("name", list(DESCRIPTIONS))
def test_a_description_is_complete(name: str) -> None:
    backend = DESCRIPTIONS[name]
    assert backend.name == name == backend.hardware.backend
    hardware = [each.name for each in backend.hardware.hardware]
    assert hardware
    assert not backend.demo_hardware or backend.demo_hardware in hardware
    for declared in backend.declared_options.values():
        assert declared.label, declared.name
        assert not declared.help.endswith(" ")
    backend.check_options({})


def test_paths_of_the_guide_exist() -> None:
    guide = (ROOT / "docs" / "backends" / "adding-a-backend.md").read_text()
    for path in re.findall(r"`((?:executors|tests|docs)/[\w./-]+)`", guide):
        assert (ROOT / path).exists(), path
    assert REGISTRY in guide
