"""The cosine that each replica tells: of its contribution, on the curve of the run, in exports."""

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
MakeWorld = Callable[..., Any]


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    made = make_world(replicas=3)
    made.start()
    return made


def tell(world: Any, round: int, *cosines: float | None) -> None:
    """Every replica's report of a round that took all of them."""
    replicas = range(len(cosines))
    for replica in replicas:
        world.bucket.contribution(round, replica)
    world.bucket.plan(round, replicas)
    world.bucket.commit(round, replicas)
    for replica, cosine in enumerate(cosines):
        report = world.bucket.report(round, cosine=cosine)
        world.bucket.segment(replica, round, losses=(2.0,), first=round, rounds=(report,))


def curve(world: Any, name: str) -> dict[int, float]:
    blocks = MetricBlock.objects.filter(run=world.run, series=name, level=0)
    points = [Points.unpack(bytes(block.data)) for block in blocks]
    return {int(r): float(v) for p in points for r, v in zip(p.round, p.value, strict=True)}


def told() -> list[float | None]:
    rows = Contribution.objects.order_by("round__number", "replica__number")
    return list(rows.values_list("cosine", flat=True))


def test_each_contribution_and_the_rounds_mean_lowest_and_highest(world: Any) -> None:
    tell(world, 1, 0.5, 0.75, -0.125)
    tell(world, 2, 0.25, None, 0.75)
    world.tick()
    assert told() == [0.5, 0.75, -0.125, 0.25, None, 0.75]
    assert curve(world, "cosine") == {1: 0.375, 2: 0.5}
    assert curve(world, "cosine_low") == {1: -0.125, 2: 0.25}
    assert curve(world, "cosine_high") == {1: 0.75, 2: 0.75}


def test_rounds_of_replicas_that_do_not_tell_have_no_curve(world: Any) -> None:
    tell(world, 1, None, None, None)
    world.tick()
    assert told() == [None] * 3
    assert curve(world, "norm") and not curve(world, "cosine")
    assert bytes(Round.objects.get(number=1).cosines) == b""


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1.5, -7.0])
def test_what_is_no_cosine_is_not_taken_for_one(world: Any, odd: float) -> None:
    tell(world, 1, odd, 0.5, 0.5)
    world.tick()
    assert told() == [None, 0.5, 0.5]
    assert curve(world, "cosine_high") == {1: 0.5}


def test_a_round_rebuilt_from_the_table_keeps_it(world: Any) -> None:
    tell(world, 1, 0.5, 0.75, 0.25)
    world.tick()
    row = Round.objects.get(number=1)
    before = bytes(row.cosines)
    assert round_strips.cosines(before, 4).tolist() == [0.5, 0.75, 0.25, 0.0]
    assert bytes(round_strips.rebuild(row).cosines) == before
    assert bytes(Round.objects.get(number=1).cosines) == before


def test_it_is_exported_and_shown_with_the_round(world: Any) -> None:
    tell(world, 1, 0.5, 0.75, 0.25)
    world.tick()
    [row] = selectors.round_rows(world.run)
    assert [c["cosine"] for c in row["contributions"]] == [0.5, 0.75, 0.25]
    [chunk] = exports.contributions_of(world.run)
    assert list(chunk["cosine"]) == [0.5, 0.75, 0.25]
