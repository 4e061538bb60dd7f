"""Pages, API and forms look rows up through ``runs.queries`` and change them through
``runs.actions``. An import contract keeps them from the layers below; types of models are allowed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

DASHBOARD = Path(__file__).parents[2] / "dashboard"
MODULES = [p for folder in ("views", "api", "forms") for p in (DASHBOARD / folder).glob("*.py")]


def models_looked_up(source: str) -> set[str]:
    """Names of the models of ``runs`` whose manager a module uses."""
    tree = ast.parse(source)
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "runs.models"
        for name in node.names
    }
    used = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("objects", "_default_manager")
        and isinstance(node.value, ast.Name)
    }
    return imported & used


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_no_lookups_outside_the_domain(path: Path) -> None:
    assert not models_looked_up(path.read_text())


def test_a_lookup_is_found() -> None:
    source = "from runs.models import Event, Run\nRun.objects.get(pk=1)\nx: Event\n"
    assert models_looked_up(source) == {"Run"}
