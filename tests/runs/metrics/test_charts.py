"""Windows of series: downsampled, complete at the edges, with their extremes."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest

from runs.metrics import charts, downsampling
from runs.metrics.blocks import Points
from runs.metrics.charts import Scales, Window
from runs.models import Run
from tests.browser import seed
from tests.matrix import matrix


def curve(steps: list[int], values: list[float]) -> Points:
    return Points.of(
        step=steps,
        round=[s // 10 for s in steps],
        tokens=[7 * s for s in steps],
        wall_s=[1e9 + 0.5 * s + 0.12345 for s in steps],
        value=values,
    )


@pytest.fixture
def run(db: Any) -> Run:
    made: Run = seed.run(seed.user("olga", "operator"), committed=0, replicas=3)
    return made


def store(run: Run, number: int | None, points: Points, series: str = "loss") -> None:
    replica = None if number is None else run.replicas.get(number=number)
    downsampling.add_points(run, replica, {series: points}, key=charts.key_of(number))


def noise(count: int, seed_: int = 1) -> list[float]:
    chance = random.Random(seed_)
    return [3 + chance.gauss(0, 0.1) for _ in range(count)]


def test_few_points_are_all_returned(run: Run) -> None:
    store(run, 0, curve(list(range(50)), noise(50)))
    (result,) = charts.read(run, [("loss", 0)], Window(max_points=50))
    assert (len(result.points), result.total, result.level) == (50, 50, 0)
    assert charts.read(run, [("loss", 1), ("lr", 0)], Window()) == []


@matrix("at", [0, 1, 4095, 33_333, 49_999], fast=(4095, 49_999))
@matrix("spike", [1e6, -1e6, math.nan, math.inf], fast=2)
def test_spike_among_many_points_remains(run: Run, at: int, spike: float) -> None:
    values = noise(50_000)
    values[at] = spike
    store(run, 0, curve(list(range(50_000)), values))
    for window in (Window(max_points=200), Window(axis="wall", low=0.0, max_points=50)):
        (result,) = charts.read(run, [("loss", 0)], window)
        assert at in result.points.step.tolist()
        assert 0 < len(result.points) <= window.max_points
        assert result.total == 50_000


@pytest.mark.parametrize("axis", charts.AXES)
@matrix("seed_", range(4), fast=1)
def test_window_has_its_points(run: Run, axis: charts.Axis, seed_: int) -> None:
    """Compared with a window over all points."""
    chance = random.Random(seed_)
    steps = sorted(chance.sample(range(60_000), 40_000))
    whole = curve(steps, noise(40_000, seed_))
    store(run, 0, whole)
    scales = Scales(sync_every=30, replicas=3)
    x = scales.x(whole, axis, 0)
    for _ in range(4):
        low, high = sorted(chance.sample(x.tolist(), 2))
        inside = whole.take((x >= low) & (x <= high))
        window = Window(axis=axis, low=low, high=high, max_points=300, scales=scales)
        (result,) = charts.read(run, [("loss", 0)], window)
        assert len(result.points) <= 300
        steps_found = result.points.step
        assert steps_found.min() >> result.level <= inside.step.min() >> result.level
        assert steps_found.max() >= inside.step.max()
        # Buckets at the edges are complete, so the extremes can be more extreme.
        assert result.points.value.min() <= inside.value.min()
        assert result.points.value.max() >= inside.value.max()
        for start in range(int(inside.step[0]), int(inside.step[-1]), 7919):
            bucket = whole.take(whole.step >> result.level == start >> result.level).value
            kept = result.points.take(steps_found >> result.level == start >> result.level).value
            assert (kept.min(), kept.max()) == (bucket.min(), bucket.max())
        aligned = (whole.step >= steps_found.min() >> result.level << result.level) & (
            whole.step < ((int(steps_found.max()) >> result.level) + 1) << result.level
        )
        assert result.total == int(aligned.sum())


@matrix("axis", charts.AXES, fast=1)
def test_zooming_in_ends_with_every_point(run: Run, axis: charts.Axis) -> None:
    whole = curve(list(range(200_000)), noise(200_000))
    store(run, 0, whole)
    x = charts.Scales().x(whole, axis, 0)
    low, high = float(x[77_000]), float(x[77_200])
    (result,) = charts.read(run, [("loss", 0)], Window(axis=axis, low=low, high=high))
    assert result.level == 0
    assert set(range(77_000, 77_201)) <= set(result.points.step.tolist())
    assert len(result.points) <= 240


def test_replicas_have_the_same_buckets(run: Run) -> None:
    for number, count in enumerate((20_000, 20_000, 9_000)):
        store(run, number, curve(list(range(count)), noise(count, number)))
    names = [("loss", n) for n in range(3)]
    result = charts.read(run, names, Window(max_points=300))
    assert len({c.level for c in result}) == 1
    level = result[0].level
    for c in result:
        buckets = np.unique(c.points.step >> level)
        assert buckets.tolist() == list(range(int(buckets[-1]) + 1))
    assert [c.total for c in result] == [20_000, 20_000, 9_000]


def test_a_window_without_points_is_empty(run: Run) -> None:
    store(run, 0, curve(list(range(100)), noise(100)))
    (result,) = charts.read(run, [("loss", 0)], Window(low=5000, high=6000))
    assert len(result.points) <= 1


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("axis", charts.AXES)
def test_number_of_queries_is_constant(
    run: Run, size: int, axis: charts.Axis, django_assert_max_num_queries: Any
) -> None:
    for number in range(size):
        store(run, number, curve(list(range(40_000)), noise(40_000)))
    names = [("loss", n) for n in range(size)]
    with django_assert_max_num_queries(3):
        charts.read(run, names, Window(axis=axis, max_points=500))
    with django_assert_max_num_queries(6):
        charts.read(run, names, Window(axis=axis, low=1e9, high=1e9 + 2000, max_points=500))


def test_nonfinite_values_are_null_and_named() -> None:
    points = curve([0, 2, 4, 6], [1.0, math.nan, math.inf, -math.inf])
    result = points.to_json(series="loss", replica=3, total=9)
    assert result["value"] == [1.0, None, None, None]
    assert result["nonfinite"] == [[1, "nan"], [2, "inf"], [3, "-inf"]]
    assert (result["series"], result["replica"], result["total"]) == ("loss", 3, 9)
    assert result["wall_s"] == [1e9 + 0.123, 1e9 + 1.123, 1e9 + 2.123, 1e9 + 3.123]
    assert json.loads(json.dumps(result, allow_nan=False)) == result
