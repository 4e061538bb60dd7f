"""Results survive a kill, and the table reports only measured arms."""

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


def test_killed_script_resumes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "quality.jsonl"
    results.append(path, result(SINGLE, 0, 1.5))
    results.append(path, result(SINGLE, 1, 1.6))
    left = results.remaining(CORE[:2], [0, 1], results.read(path))
    assert [(arm.name, seed) for arm, seed in left] == [("data_parallel", 0), ("data_parallel", 1)]


def test_truncated_line_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "quality.jsonl"
    results.append(path, result(SINGLE, 0, 1.5))
    with path.open("a") as file:
        file.write('{"arm": "single", "se')
    assert [r["seed"] for r in results.read(path)] == [0]
    results.append(path, result(SINGLE, 1, 1.6))
    assert [r["seed"] for r in results.read(path)] == [0, 1]


def test_result_of_another_definition_is_ignored() -> None:
    changed = result(SINGLE, 0, 1.5)
    changed["definition"]["settings"]["inner_lr"] = 0.1
    assert len(list(results.remaining([SINGLE], [0], [changed]))) == 1
    assert not list(results.remaining([SINGLE], [0], [result(SINGLE, 0, 1.5)]))


def test_table_has_mean_and_spread_and_compares_equal_seeds() -> None:
    measured = [result(DILOCO, 0, 1.5), result(DILOCO, 1, 1.7)]
    measured += [result(SINGLE, 0, 1.4), result(SINGLE, 1, 1.6)]
    table = results.table(CORE, measured)
    assert "| 2 | 1.6000 ± 0.1414 |  |" in table
    assert "| 2 | 1.5000 ± 0.1414 | -9.52 ± 0.00 % |" in table  # exp(-0.1) - 1, at both seeds
    assert table.endswith(f"Not measured: {DATA_PARALLEL.title}.")


def test_newest_result_of_an_arm_and_seed_counts() -> None:
    measured = [result(DILOCO, 0, 1.5), result(DILOCO, 0, 1.3)]
    assert "| 1 | 1.3000 |" in results.table([DILOCO], measured)


@pytest.mark.parametrize(("values", "expected"), [([1.0], "1.00"), ([1.0, 3.0], "2.00 ± 1.41")])
def test_spread(values: list[float], expected: str) -> None:
    assert results.spread(values, ".2f") == expected
