"""The recipes train two replicas to the same weights, and differ from plain scripts by few lines.

``recipes_program.py`` runs all of them once for this module."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests import torch_process

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
LINES = {
    "trainer_lora": 4,
    "trl_sft_lora": 4,
    "accelerate_loop": 5,
    "lightning_fit": 5,
    "fsdp2_loop": 6,
    "nanogpt_loop": 6,
    "diffusion": 5,
}
"""Lines that each recipe adds to the plain script."""

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=3)]


@pytest.fixture(scope="module")
def plain_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain", RECIPES / "plain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the output of all recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
    }
    done = torch_process.run(
        [Path(__file__).with_name("recipes_program.py"), folder, *LINES], env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return folder


def log(folder: Path, recipe: str, name: str) -> str:
    return (folder / f"{recipe}.{name}.log").read_text()


def outputs(folder: Path, recipe: str, pattern: str) -> list[str]:
    """Return the first group of the pattern in the output of each replica's first rank."""
    found = [re.search(pattern, log(folder, recipe, f"{replica}.0")) for replica in range(2)]
    return [match.group(1) if match else "" for match in found]


def test_every_recipe_is_tested_and_has_a_page() -> None:
    shared = {"tiny", "tiny_gpt", "plain", "demonstrate"}
    scripts = {path.stem for path in RECIPES.glob("*.py")} - shared
    assert scripts == LINES.keys()
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "recipes").glob("*.md"))
    assert not [name for name in scripts if f"examples/recipes/{name}.py" not in pages]


@pytest.mark.parametrize(("recipe", "lines"), LINES.items())
def test_a_recipe_adds_few_lines(plain_module: ModuleType, recipe: str, lines: int) -> None:
    source = (RECIPES / f"{recipe}.py").read_text()
    assert len(plain_module.marked(source)) == lines
    assert "import diloco" not in plain_module.plain(source)


@pytest.mark.parametrize("recipe", LINES)
def test_both_replicas_end_with_the_same_weights(played: Path, recipe: str) -> None:
    exits = json.loads((played / "exits.json").read_text())
    assert set(exits[recipe]) == {0}, log(played, recipe, "0.0") + log(played, recipe, "1.0")
    one, other = outputs(played, recipe, r"digest ([0-9a-f]{16})")
    assert one and one == other


@pytest.mark.parametrize("recipe", LINES)
def test_the_script_without_the_added_lines_runs_alone(played: Path, recipe: str) -> None:
    exits = json.loads((played / "exits.json").read_text())
    assert exits[f"{recipe} plain"] == [0], log(played, recipe, "plain")
    assert re.search(r"digest [0-9a-f]{16}", log(played, recipe, "plain"))


def test_averaged_buffers_are_equal_at_the_end(played: Path) -> None:
    one, other = outputs(played, "diffusion", r"buffers ([0-9a-f]{16})")
    assert one and one == other


@pytest.mark.parametrize("recipe", ["trainer_lora", "trl_sft_lora"])
def test_the_merged_model_has_learned_the_new_sentences(played: Path, recipe: str) -> None:
    merged = r"loss of the merged model (\d+\.\d+)"
    one, other = (float(loss) for loss in outputs(played, recipe, merged))
    alone = re.search(merged, log(played, recipe, "plain"))
    assert alone is not None
    assert one == other < float(alone.group(1)) - 0.5  # which has made three steps
