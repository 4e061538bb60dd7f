"""Roll-ups: the same rows however the points came, and nothing that a chart needs is lost."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
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
    found = MetricBlock.objects.filter(run=run).select_related("replica")
    return {
        (b.series, b.replica and b.replica.number, b.level, b.index): (b.count, bytes(b.data))
        for b in found
    }


@given(st.lists(FLOATS, max_size=300), st.integers(0, 5), st.integers(0, 5))
def test_a_coarser_level_is_made_of_a_finer_one(values: list[float], a: int, b: int) -> None:
    curve = points(list(range(len(values))), values)
    assert keep(keep(curve, "step", a), "step", a + b).pack() == keep(curve, "step", a + b).pack()


@given(st.lists(FLOATS, min_size=1, max_size=300), st.integers(1, 6))
def test_each_bucket_keeps_its_extremes_its_last_and_what_is_no_number(
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
    found = put_range(points([1, 5, 9]), points([6, 7]), "step", 5, 9)
    assert found.step.tolist() == [1, 6, 7, 9]
    assert put_range(Points.empty(), points([3]), "step", 0, 8).step.tolist() == [3]


def test_levels_begin_with_a_second_block_and_hold_what_keep_says(run: Run) -> None:
    replica = run.replicas.get(number=0)
    whole = points(list(range(9000)))
    downsampling.add_points(run, replica, {"loss": whole}, key="step")
    found = rows(run)
    assert {level for _, _, level, _ in found} == {0, 3, 6, 9}
    for level in (3, 6, 9):
        blocks = [data for (_, _, lv, _), (_, data) in sorted(found.items()) if lv == level]
        assert len(blocks) == math.ceil(9000 / width(level))
        together = concatenate([Points.unpack(data) for data in blocks])
        assert together.pack() == keep(whole, "step", level).pack()
        assert sum(count for (_, _, lv, _), (count, _) in found.items() if lv == level) == 9000


def test_a_short_series_has_no_roll_up(run: Run) -> None:
    downsampling.add_points(run, None, {"eval_loss": points(list(range(BLOCK_STEPS)))}, key="step")
    assert [key[2] for key in rows(run)] == [0]


@pytest.mark.parametrize("seed_", range(6))
def test_rows_are_the_same_however_points_come(run: Run, seed_: int) -> None:
    """In order and out of it, in pieces, twice, replaced, with a late beginning."""
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
    found = rows(run)
    mine = {(s, *place): row for (s, r, *place), row in found.items() if r == 0}
    others = {(s, *place): row for (s, r, *place), row in found.items() if r == 1}
    assert mine == others


def test_series_older_than_the_roll_ups_get_the_same(run: Run) -> None:
    whole = points(list(range(100, 20_000, 2)))
    downsampling.add_points(run, None, {"norm": whole}, key="step")
    expected = rows(run)
    MetricBlock.objects.filter(level__gt=0).delete()
    downsampling.build(run, None, "norm", key="step")
    assert rows(run) == expected


def test_a_live_batch_costs_few_queries_however_long_the_series(
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


def test_the_highest_step_there_may_be_fits_the_tables(run: Run) -> None:
    from runs.metrics.blocks import MAX_KEY

    downsampling.add_points(run, None, {"loss": points([0, MAX_KEY])}, key="step")
    top = MetricBlock.objects.filter(run=run).order_by("-level").values_list("level", "index")
    assert top[0] == (LEVELS[-1], 0)
    assert max(index for _, index in top) < 2**31
