"""Results survive a kill, and the table says just what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.experiments import results
from bench.experiments.arms import CORE, Arm


def result(arm: Arm, seed: int, loss: float) -> results.Result:
    return {
        "arm": arm.name,
        "seed": seed,
        "loss": loss,
        "tokens": arm.tokens,
        "definition": arm.definition(seed),
    }


SINGLE, DATA_PARALLEL, DILOCO = CORE


def test_a_killed_script_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "quality.jsonl"
    results.append(path, result(SINGLE, 0, 1.5))
    results.append(path, result(SINGLE, 1, 1.6))
    left = results.remaining(CORE[:2], [0, 1], results.read(path))
    assert [(arm.name, seed) for arm, seed in left] == [("data_parallel", 0), ("data_parallel", 1)]


def test_a_torn_line_is_done_again_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "quality.jsonl"
    results.append(path, result(SINGLE, 0, 1.5))
    with path.open("a") as file:
        file.write('{"arm": "single", "se')
    assert [r["seed"] for r in results.read(path)] == [0]
    results.append(path, result(SINGLE, 1, 1.6))
    assert [r["seed"] for r in results.read(path)] == [0, 1]


def test_a_result_of_another_definition_does_not_count() -> None:
    changed = result(SINGLE, 0, 1.5)
    changed["definition"]["settings"]["inner_lr"] = 0.1
    assert len(list(results.remaining([SINGLE], [0], [changed]))) == 1
    assert not list(results.remaining([SINGLE], [0], [result(SINGLE, 0, 1.5)]))


def test_the_table_has_mean_and_spread_and_compares_seed_by_seed() -> None:
    found = [result(DILOCO, 0, 1.5), result(DILOCO, 1, 1.7)]
    found += [result(SINGLE, 0, 1.4), result(SINGLE, 1, 1.6)]
    table = results.table(CORE, found)
    assert "| 2 | 1.6000 ± 0.1414 |  |" in table
    assert "| 2 | 1.5000 ± 0.1414 | -9.52 ± 0.00 % |" in table  # exp(-0.1) - 1, at both seeds
    assert table.endswith(f"Not measured: {DATA_PARALLEL.title}.")


def test_the_newest_result_of_an_arm_and_seed_counts() -> None:
    found = [result(DILOCO, 0, 1.5), result(DILOCO, 0, 1.3)]
    assert "| 1 | 1.3000 |" in results.table([DILOCO], found)


@pytest.mark.parametrize(("values", "said"), [([1.0], "1.00"), ([1.0, 3.0], "2.00 ± 1.41")])
def test_spread(values: list[float], said: str) -> None:
    assert results.spread(values, ".2f") == said
