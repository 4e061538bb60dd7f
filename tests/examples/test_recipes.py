"""The recipes train two replicas to the same weights, and run alone without the added lines.

``recipes_program.py`` runs all of them once for this module."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests import torch_process
from tests.examples.recipes_program import NAMES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=2)]


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
        [Path(__file__).with_name("recipes_program.py"), folder, *NAMES], env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return folder


def log(folder: Path, recipe: str, name: str) -> str:
    return (folder / f"{recipe}.{name}.log").read_text()


def outputs(folder: Path, recipe: str, pattern: str) -> list[str]:
    """Return the first group of the pattern in the output of each replica's first rank."""
    found = [re.search(pattern, log(folder, recipe, f"{replica}.0")) for replica in range(2)]
    return [match.group(1) if match else "" for match in found]


@pytest.mark.parametrize("recipe", NAMES)
def test_both_replicas_end_with_the_same_weights(played: Path, recipe: str) -> None:
    exits = json.loads((played / "exits.json").read_text())
    assert set(exits[recipe]) == {0}, log(played, recipe, "0.0") + log(played, recipe, "1.0")
    one, other = outputs(played, recipe, r"digest ([0-9a-f]{16})")
    assert one and one == other


@pytest.mark.parametrize("recipe", NAMES)
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
