"""The reported cosine of each contribution: in the table, on the run's curve and in exports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from runs.metrics import round_strips
from runs.metrics.blocks import Points
from runs.models import Contribution, MetricBlock, Round
from runs.queries import exports, selectors

pytestmark = pytest.mark.django_db
MakeHarness = Callable[..., Any]


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=3)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def write_round(harness: Any, round: int, *cosines: float | None) -> None:
    """Write every replica's report of a round that included all of them."""
    replicas = range(len(cosines))
    for replica in replicas:
        harness.bucket.contribution(round, replica)
    harness.bucket.plan(round, replicas)
    harness.bucket.commit(round, replicas)
    for replica, cosine in enumerate(cosines):
        report = harness.bucket.report(round, cosine=cosine)
        harness.bucket.segment(replica, round, losses=(2.0,), first=round, rounds=(report,))


def curve(harness: Any, name: str) -> dict[int, float]:
    blocks = MetricBlock.objects.filter(run=harness.run, series=name, level=0)
    points = [Points.unpack(bytes(block.data)) for block in blocks]
    return {int(r): float(v) for p in points for r, v in zip(p.round, p.value, strict=True)}


def reported() -> list[float | None]:
    rows = Contribution.objects.order_by("round__number", "replica__number")
    return list(rows.values_list("cosine", flat=True))


def test_each_contribution_and_the_mean_and_range_of_the_round(harness: Any) -> None:
    write_round(harness, 1, 0.5, 0.75, -0.125)
    write_round(harness, 2, 0.25, None, 0.75)
    harness.tick()
    assert reported() == [0.5, 0.75, -0.125, 0.25, None, 0.75]
    assert curve(harness, "cosine") == {1: 0.375, 2: 0.5}
    assert curve(harness, "cosine_low") == {1: -0.125, 2: 0.25}
    assert curve(harness, "cosine_high") == {1: 0.75, 2: 0.75}


def test_rounds_without_reported_cosines_have_no_curve(harness: Any) -> None:
    write_round(harness, 1, None, None, None)
    harness.tick()
    assert reported() == [None] * 3
    assert curve(harness, "norm") and not curve(harness, "cosine")
    assert bytes(Round.objects.get(number=1).cosines) == b""


@pytest.mark.parametrize("invalid", [math.nan, math.inf, 1.5, -7.0])
def test_values_outside_the_range_of_a_cosine_are_ignored(harness: Any, invalid: float) -> None:
    write_round(harness, 1, invalid, 0.5, 0.5)
    harness.tick()
    assert reported() == [None, 0.5, 0.5]
    assert curve(harness, "cosine_high") == {1: 0.5}


def test_a_round_rebuilt_from_the_table_keeps_its_cosines(harness: Any) -> None:
    write_round(harness, 1, 0.5, 0.75, 0.25)
    harness.tick()
    row = Round.objects.get(number=1)
    before = bytes(row.cosines)
    assert round_strips.cosines(before, 4).tolist() == [0.5, 0.75, 0.25, 0.0]
    assert bytes(round_strips.rebuild(row).cosines) == before
    assert bytes(Round.objects.get(number=1).cosines) == before


def test_the_cosine_is_exported_and_shown_with_the_round(harness: Any) -> None:
    write_round(harness, 1, 0.5, 0.75, 0.25)
    harness.tick()
    [row] = selectors.round_rows(harness.run)
    assert [c["cosine"] for c in row["contributions"]] == [0.5, 0.75, 0.25]
    [chunk] = exports.TABLES["contributions"].chunks(harness.run)
    assert list(chunk["cosine"]) == [0.5, 0.75, 0.25]
