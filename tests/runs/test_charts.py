"""Thinning keeps what an eye would miss; JSON has no NaN."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs import charts
from runs.blocks import Points


def curve(values: list[float]) -> Points:
    steps = list(range(len(values)))
    return Points.of(
        step=steps, round=steps, tokens=steps, wall_s=[s + 0.12345 for s in steps], value=values
    )


@given(st.lists(st.floats(), max_size=400), st.integers(8, 60))
def test_thinned_points_are_few_in_order_and_from_the_curve(values: list[float], most: int) -> None:
    thinned = charts.thin(curve(values), most)
    assert len(thinned) <= max(most, 8)
    steps = thinned.step.tolist()
    assert steps == sorted(set(steps))
    if values:
        assert (steps[0], steps[-1]) == (0, len(values) - 1)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=400))
def test_the_extremes_stay(values: list[float]) -> None:
    kept = charts.thin(curve(values), 20).value
    assert (kept.min(), kept.max()) == (min(values), max(values))


@pytest.mark.parametrize("at", [1, 499, 777, 998])
@pytest.mark.parametrize("spike", [1e6, -1e6, math.nan, math.inf])
def test_one_spike_among_a_thousand_points_stays(at: int, spike: float) -> None:
    values = [1.0 + 1e-6 * (i % 7) for i in range(1000)]
    values[at] = spike
    assert at in charts.thin(curve(values), 50).step.tolist()


def test_few_points_are_left_as_they_are() -> None:
    points = curve([1.0] * 50)
    assert charts.thin(points, 50) is points
    assert len(charts.thin(points, 49)) < 50


def test_what_is_no_number_is_null_and_named() -> None:
    found = charts.columns(
        curve([1.0, math.nan, math.inf, -math.inf]), series="loss", replica=3, total=9
    )
    assert found["value"] == [1.0, None, None, None]
    assert found["nonfinite"] == [[1, "nan"], [2, "inf"], [3, "-inf"]]
    assert (found["series"], found["replica"], found["total"]) == ("loss", 3, 9)
    assert found["wall_s"] == [0.123, 1.123, 2.123, 3.123]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
