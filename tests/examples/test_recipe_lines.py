"""Each recipe adds the documented number of lines to a plain script, and has a page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.recipes_program import NAMES, RECIPES

PAGES = Path(__file__).resolve().parents[2] / "docs" / "recipes"
LINES = {
    "accelerate_loop": 5,
    "diffusion": 5,
    "fsdp2_loop": 6,
    "lightning_fit": 5,
    "nanogpt_loop": 6,
    "trainer_lora": 4,
    "trl_sft_lora": 4,
}


@pytest.fixture(scope="module")
def plain_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain", RECIPES / "plain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_recipe_has_a_page_and_a_row_with_its_lines() -> None:
    assert LINES.keys() == set(NAMES)
    table = (PAGES / "README.md").read_text().splitlines()
    pages = "\n".join(path.read_text() for path in PAGES.glob("*.md") if path.stem != "README")
    for name, lines in LINES.items():
        [row] = [row for row in table if row.startswith("|") and f"/{name}.py)" in row]
        assert f" | {lines} | " in row
        assert f"examples/recipes/{name}.py" in pages


@pytest.mark.parametrize(("name", "lines"), LINES.items())
def test_a_recipe_adds_few_lines(plain_module: ModuleType, name: str, lines: int) -> None:
    source = (RECIPES / f"{name}.py").read_text()
    assert len(plain_module.marked(source)) == lines
    plain = plain_module.plain(source)
    assert "diloco" not in plain.split('"""', 2)[2]
    compile(plain, name, "exec")


def test_the_block_of_a_removed_with_statement_loses_its_indentation(
    plain_module: ModuleType,
) -> None:
    source = "a\nwith group:  # diloco\n    b\n\n    if c:\n        d\ne\n"
    assert plain_module.plain(source) == "a\nb\n\nif c:\n    d\ne\n"
