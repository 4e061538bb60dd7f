"""Blocks of points: one point per key, in any order of arrival."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs.metrics import blocks
from runs.metrics.blocks import (
    BLOCK_STEPS,
    BadBlock,
    Points,
    concatenate,
    keep,
    keep_each,
    merge,
    split,
    thin,
    thin_each,
    unpack_all,
)


def points(steps: list[int], values: list[float] | None = None) -> Points:
    return Points.of(
        step=steps,
        round=[s // 10 for s in steps],
        tokens=[100 * s for s in steps],
        wall_s=[1e9 + s for s in steps],
        value=values if values is not None else [float(s) for s in steps],
    )


@given(st.lists(st.tuples(st.integers(0, 2**53), st.floats())))
def test_pack_and_unpack_round_trip(points: list[tuple[int, float]]) -> None:
    steps = [step for step, _ in points]
    packed = Points.of(
        step=steps,
        round=[s % 2**31 for s in steps],
        tokens=steps,
        wall_s=[1.5] * len(steps),
        value=[value for _, value in points],
    )
    again = Points.unpack(packed.pack())
    for name in ("step", "round", "tokens", "wall_s", "value"):
        np.testing.assert_array_equal(getattr(again, name), getattr(packed, name))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"AMB1",
        points([1]).pack()[:-1],
        points([1]).pack() + b"x",
        b"X" + points([1]).pack()[1:],
    ],
)
def test_invalid_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadBlock, match=r"expected .* found"):
        Points.unpack(data)


def test_columns_need_equal_lengths() -> None:
    with pytest.raises(ValueError, match="columns of one length"):
        Points.of(step=[1, 2], round=[1], tokens=[1], wall_s=[1], value=[1])


def test_new_point_replaces_the_old_one() -> None:
    merged = merge(points([1, 2, 3]), points([3, 2], [30.0, 20.0]), "step")
    assert merged.step.tolist() == [1, 2, 3]
    assert merged.value.tolist() == [1.0, 20.0, 30.0]


def test_last_of_several_new_points_remains() -> None:
    merged = merge(Points.empty(), points([5, 5, 5], [1.0, 2.0, math.nan]), "step")
    assert len(merged) == 1
    assert math.isnan(merged.value[0])


@given(
    st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)), st.sampled_from(["step", "round"])
)
def test_merging_twice_is_merging_once(old: list[int], new: list[int], key: str) -> None:
    fresh = points(new, [s + 0.5 for s in new])
    once = merge(points(old), fresh, key)  # type: ignore[arg-type]
    twice = merge(once, fresh, key)  # type: ignore[arg-type]
    assert twice.pack() == once.pack()
    keys = getattr(once, key).tolist()
    assert keys == sorted(set(keys))


def test_points_are_split_by_key() -> None:
    steps = [0, BLOCK_STEPS - 1, BLOCK_STEPS, 5 * BLOCK_STEPS]
    parts = dict(split(points(steps), "step"))
    assert {index: part.step.tolist() for index, part in parts.items()} == {
        0: [0, BLOCK_STEPS - 1],
        1: [BLOCK_STEPS],
        5: [5 * BLOCK_STEPS],
    }
    assert [index for index, _ in split(points(steps), "round")] == [0]


def test_empty_points() -> None:
    assert len(concatenate([])) == len(Points.unpack(Points.empty().pack())) == 0
    assert list(split(Points.empty(), "step")) == []


@given(st.lists(st.integers(0, 40), max_size=6))
def test_blocks_are_parsed_together(sizes: list[int]) -> None:
    parts = [points([*range(100 * i, 100 * i + size)]) for i, size in enumerate(sizes)]
    joined, counts = unpack_all([part.pack() for part in parts])
    assert counts == sizes
    assert joined.pack() == concatenate(parts).pack()


VALUES = st.sampled_from([0.0, 1.0, 2.0, math.inf, -math.inf, math.nan])


@given(st.lists(st.lists(VALUES, max_size=30), max_size=6), st.integers(0, 4), st.integers(1, 40))
def test_series_are_downsampled_together_as_alone(
    series: list[list[float]], level: int, at_once: int
) -> None:
    parts = [points([*range(len(values))], values) for values in series]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "AT_ONCE", at_once)
        together = [part.pack() for part in keep_each(parts, "step", level)]
        thinned = [(part.pack(), at) for part, at in thin_each(parts, "step", 8, level)]
    assert together == [keep(part, "step", level).pack() for part in parts]
    alone = [thin(part, "step", 8, level) for part in parts]
    assert thinned == [(part.pack(), at) for part, at in alone]
