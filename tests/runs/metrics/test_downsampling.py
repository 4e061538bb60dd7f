"""Downsampling: the rows do not depend on the order of points, and keep the extremes."""

from __future__ import annotations

import math
import random
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from django.apps import apps
from hypothesis import given
from hypothesis import strategies as st

from runs.metrics import downsampling
from runs.metrics.blocks import BLOCK_STEPS, LEVELS, Points, concatenate, keep, put_range, width
from runs.models import MetricBlock, Run
from tests.browser import seed

FLOATS = st.one_of(st.floats(), st.sampled_from([1.0, 2.0, math.nan, math.inf, -math.inf]))


def points(steps: list[int], values: list[float] | None = None) -> Points:
    return Points.of(
        step=steps,
        round=[min(s // 10, 2**31 - 1) for s in steps],
        tokens=[100 * s for s in steps],
        wall_s=[1e9 + s for s in steps],
        value=values if values is not None else [math.sin(s / 50) for s in steps],
    )


@pytest.fixture
def run(db: Any) -> Run:
    made: Run = seed.run(seed.user("olga", "operator"), committed=0, replicas=2)
    return made


def rows(run: Run) -> dict[Any, Any]:
    result = MetricBlock.objects.filter(run=run).select_related("replica")
    return {
        (b.series, b.replica and b.replica.number, b.level, b.index): (b.count, bytes(b.data))
        for b in result
    }


@given(st.lists(FLOATS, max_size=300), st.integers(0, 5), st.integers(0, 5))
def test_coarser_level_is_computed_from_a_finer_one(values: list[float], a: int, b: int) -> None:
    curve = points(list(range(len(values))), values)
    assert keep(keep(curve, "step", a), "step", a + b).pack() == keep(curve, "step", a + b).pack()


@given(st.lists(FLOATS, min_size=1, max_size=300), st.integers(1, 6))
def test_bucket_keeps_extremes_last_and_first_nonfinite_point(
    values: list[float], level: int
) -> None:
    kept = keep(points(list(range(len(values))), values), "step", level)
    for start in range(0, len(values), 1 << level):
        bucket = values[start : start + (1 << level)]
        inside = kept.take((kept.step >= start) & (kept.step < start + len(bucket)))
        finite = [v for v in bucket if math.isfinite(v)]
        assert 1 <= len(inside) <= 4
        assert inside.step[-1] == start + len(bucket) - 1
        if finite:
            seen = inside.value[np.isfinite(inside.value)]
            assert (seen.min(), seen.max()) == (min(finite), max(finite))
            assert len(inside) <= 3 or len(finite) < len(bucket)
        odd = [start + i for i, v in enumerate(bucket) if not math.isfinite(v)]
        if odd:
            assert odd[0] in inside.step


def test_a_range_is_replaced() -> None:
    result = put_range(points([1, 5, 9]), points([6, 7]), "step", 5, 9)
    assert result.step.tolist() == [1, 6, 7, 9]
    assert put_range(Points.empty(), points([3]), "step", 0, 8).step.tolist() == [3]


def test_levels_are_those_of_the_whole_series(run: Run) -> None:
    replica = run.replicas.get(number=0)
    whole = points(list(range(140_000)))
    downsampling.add_points(run, replica, {"loss": whole}, key="step")
    result = rows(run)
    assert {level for _, _, level, _ in result} == {0, *LEVELS}
    for level in LEVELS:
        blocks = [data for (_, _, lv, _), (_, data) in sorted(result.items()) if lv == level]
        assert len(blocks) == math.ceil(140_000 / width(level))
        together = concatenate([Points.unpack(data) for data in blocks])
        assert together.pack() == keep(whole, "step", level).pack()
        assert sum(count for (_, _, lv, _), (count, _) in result.items() if lv == level) == 140_000


def test_short_series_has_one_block_per_level(run: Run) -> None:
    downsampling.add_points(run, None, {"eval_loss": points(list(range(BLOCK_STEPS)))}, key="step")
    assert sorted(key[2:] for key in rows(run)) == [(0, 0), *((level, 0) for level in LEVELS)]


def test_migration_computes_the_levels_of_earlier_versions_again(run: Run) -> None:
    migration = import_module("runs.migrations.0027_metric_levels")
    curve = points(list(range(0, 140_000, 3)))
    replica = run.replicas.get(number=1)
    downsampling.add_points(run, None, {"eval_loss": curve}, key="round")
    downsampling.add_points(run, replica, {"loss": curve, "lr": points([7])}, key="step")
    expected = rows(run)
    MetricBlock.objects.filter(level=LEVELS[0]).delete()
    MetricBlock.objects.filter(level=LEVELS[1]).update(level=3, data=b"of an earlier version")
    migration.rebuild(apps, None)
    assert rows(run) == expected


@pytest.mark.parametrize("seed_", range(6))
def test_rows_do_not_depend_on_the_order_of_points(run: Run, seed_: int) -> None:
    """In order and shuffled, in parts, twice, replaced, and with a late first point."""
    chance = random.Random(seed_)
    one, other = run.replicas.order_by("number")
    start = chance.choice([0, 0, 700, 5000])
    steps = sorted(chance.sample(range(start, start + 6000), 3000))
    values = [chance.choice([chance.gauss(0, 1), math.nan, 1.0]) for _ in steps]
    final = points(steps, values)
    downsampling.add_points(run, one, {"loss": final, "lr": final}, key="step")

    order = list(range(0, 3000, 250))
    if seed_ % 2:
        chance.shuffle(order)
    for first in order:
        part = final.take(slice(first, first + 250))
        wrong = points(part.step.tolist(), [99.0 - s for s in part.step.tolist()])
        downsampling.add_points(run, other, {"loss": wrong}, key="step")
        downsampling.add_points(run, other, {"loss": part, "lr": part}, key="step")
        downsampling.add_points(run, other, {"lr": part}, key="step")
    result = rows(run)
    expected = {(s, *place): row for (s, r, *place), row in result.items() if r == 0}
    others = {(s, *place): row for (s, r, *place), row in result.items() if r == 1}
    assert expected == others


def test_live_batch_makes_few_queries_for_any_length(
    run: Run, django_assert_max_num_queries: Any
) -> None:
    replica = run.replicas.get(number=0)
    for length in (100, 70_000):
        steps = list(range(length))
        downsampling.add_points(
            run, replica, {"loss": points(steps), "lr": points(steps)}, key="step"
        )
        more = points(list(range(length, length + 20)))
        with django_assert_max_num_queries(6):
            downsampling.add_points(run, replica, {"loss": more, "lr": more}, key="step")


def test_highest_step_fits_the_table(run: Run) -> None:
    from runs.metrics.blocks import MAX_KEY

    downsampling.add_points(run, None, {"loss": points([0, MAX_KEY])}, key="step")
    indexes = MetricBlock.objects.filter(run=run, level=0).values_list("index", flat=True)
    assert sorted(indexes) == [0, 2**31 - 1]
