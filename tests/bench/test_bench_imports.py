"""Every import of a benchmark exists, also those inside of functions, which no other test runs."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"archipelago", "bench", "dashboard", "diloco", "executors", "runs", "tests"}
SCRIPTS = sorted((ROOT / "bench").rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_import_exists(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            module = importlib.import_module(str(node.module))
            for name in (each.name for each in node.names):
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")
