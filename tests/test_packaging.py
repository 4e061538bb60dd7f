"""The wheel holds the complete replica library and command line, and no server."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wheel import PACKED, ROOT, build_wheel

COMES_WITH = {"azure": "adlfs", "botocore": "s3fs", "lm_eval": "lm-eval"}
"""Import name -> the declared distribution that has it or depends on it."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the wheel."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the wheel's contents and site-packages, without the repository."""
    start = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
    return subprocess.run(
        [sys.executable, "-I", "-c", start + code, *arguments],
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=600,
    )


def command(installed: Path, module: str, *arguments: str) -> str:
    """Run ``python -m module`` and return its output."""
    code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = run(installed, code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metadata(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return archive.read(name).decode().splitlines()


def _sources() -> Iterator[Path]:
    for name in PACKED:
        yield from (ROOT / name).rglob("*.py")


def test_the_wheel_holds_only_the_library(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    sources = {path.relative_to(ROOT).as_posix() for path in _sources()}
    assert names == sources | {f"{package}/py.typed" for package in PACKED}
    assert any(line == "License-Expression: MIT" for line in metadata(wheel))


def test_the_distribution_has_a_unique_name(wheel: Path) -> None:
    """On the package index, ``archipelago`` is another project with the same import name."""
    assert "Name: archipelago-diloco" in metadata(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (scripts,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "archipelago = archipelago.cli:main" in archive.read(scripts).decode()


def test_no_text_recommends_the_other_package() -> None:
    names = subprocess.run(
        ["git", "ls-files", "--", ":!tests"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    wrong = re.compile(r"pip install[^\n]*['\" ]archipelago(?!-diloco)(?![-/\w])")
    result = []
    for name in names:
        with contextlib.suppress(UnicodeDecodeError):
            result += [f"{name}: {m.group()}" for m in wrong.finditer((ROOT / name).read_text())]
    assert not result


def test_it_requires_neither_the_server_nor_torch(wheel: Path) -> None:
    prefix = "Requires-Dist: "
    required = [line.removeprefix(prefix) for line in metadata(wheel) if line.startswith(prefix)]
    always = {re.split(r"[^\w-]", line)[0] for line in required if "extra ==" not in line}
    assert always == {"fsspec", "numpy", "safetensors", "xxhash"}
    extras = {line.split(": ")[1] for line in metadata(wheel) if line.startswith("Provides-Extra")}
    assert {"torch", "s3", "gcs", "azure", "server"} <= extras


def test_every_import_of_the_library_is_declared(wheel: Path) -> None:
    declared = {
        re.split(r"[^\w-]", line.split(": ")[1])[0]
        for line in metadata(wheel)
        if line.startswith("Requires-Dist: ") and "server" not in line
    }
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in _sources()
        for name in imported(path)
        if COMES_WITH.get(name, name) not in declared
    }
    assert not undeclared


def imported(path: Path) -> Iterator[str]:
    """Top-level names of the third-party packages that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in PACKED:
                yield top


def test_importing_it_imports_no_torch(installed: Path) -> None:
    code = (
        "import diloco, diloco.init, diloco.inspect, diloco.simulate\n"
        "assert diloco.__file__.startswith(sys.path[0]), diloco.__file__\n"
        "print(sorted({'torch', 'django', 'celery', 's3fs'} & set(sys.modules)))"
    )
    done = run(installed, code)
    assert done.stdout == "[]\n", done.stderr


def test_without_torch_the_error_names_the_package_to_install(installed: Path) -> None:
    done = run(installed, "import diloco; sys.modules['torch'] = None; diloco.join")
    message = "diloco.join: expected torch, found none; run pip install 'archipelago-diloco[torch]'"
    assert done.stderr.endswith(f"ModuleNotFoundError: {message}\n")


@pytest.mark.parametrize("name", ["evaluate", "export", "generate", "replica", "syncer"])
def test_without_torch_a_command_is_one_line(installed: Path, name: str) -> None:
    done = run(
        installed,
        "import runpy; sys.modules['torch'] = None; "
        f"runpy.run_module('diloco.{name}', run_name='__main__', alter_sys=True)",
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: expected torch, found none; run pip install 'archipelago")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_whole_run(installed: Path, tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    options = "--own-loop --num-replicas 1 --sync-every 2 --total-rounds 2 --warmup-steps 0"
    assert "diloco.join(" in command(installed, "diloco.init", uri, *options.split())
    assert "no replica has joined yet" in command(installed, "diloco.inspect", uri)
    train = (
        "import torch, diloco\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "arguments = {'replica': 0, 'model': model, 'inner_optimizer': optimizer}\n"
        "with diloco.join(sys.argv[1], **arguments) as group:\n"
        "    while not group.done:\n"
        "        loss = model(torch.ones(2, 3)).square().mean()\n"
        "        optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "        group.step(tokens=2, loss=loss)\n"
        "assert not {'django', 'celery'} & set(sys.modules)\n"
        "print(group.reason)"
    )
    done = run(installed, train, uri)
    assert done.stdout == "completed\n", done.stderr
    shown = command(installed, "diloco.inspect", uri)
    assert "2 of 2 rounds committed" in shown
    assert "health: no problems" in shown


def test_a_plan_can_be_predicted(installed: Path) -> None:
    options = "--parameters 1M --step-s 1 --num-replicas 2"
    assert "utilisation" in command(installed, "diloco.simulate", *options.split())


def test_the_command_line_needs_only_python(installed: Path, wheel: Path) -> None:
    code = (
        "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "from archipelago.cli import main; sys.exit(main(['example']))"
    )
    done = run(installed, code)
    assert done.returncode == 0, done.stderr
    assert "[[pools]]" in done.stdout
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "archipelago = archipelago.cli:main" in archive.read(name).decode()
