"""Replicas that catch up while a round closes are healing, not missing; imports agree."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from runs.ingest.rounds import ingest_rounds
from runs.ingest.stores import store_for
from runs.metrics import healing, round_strips
from runs.metrics.changes import Changes
from runs.models import Event, Round
from runs.queries import selectors
from runs.states import ReplicaState
from tests.runs.run_harness import Bucket, Clock

pytestmark = pytest.mark.django_db

ROUND_S = 10.0


class Scene:
    """Rounds of three replicas; round n closes n * :data:`ROUND_S` after the start."""

    def __init__(self, run: Any, clock: Clock) -> None:
        self.run, self.begun = run, clock()
        self.store = store_for(run)

    def event(self, replica: int, at_round: float, to: str) -> None:
        Event.objects.create(
            run=self.run,
            replica=self.run.replicas.get(number=replica),
            kind="replica_state",
            at=self.begun + datetime.timedelta(seconds=at_round * ROUND_S),
            to_state=to,
        )

    def close(self, number: int, *given: int) -> None:
        wall_s = self.begun.timestamp() + number * ROUND_S
        bucket = Bucket(self.store, wall_s=wall_s)
        for replica in given:
            bucket.contribution(number, replica)
        bucket.plan(number, list(given))
        bucket.commit(number, list(given), wall_s=wall_s)

    def read(self) -> None:
        self.run.refresh_from_db()
        ingest_rounds(self.run, self.store, now=self.begun, changes=Changes())

    def healing(self) -> dict[int, list[int]]:
        rows = Round.objects.filter(run=self.run).order_by("number")
        result = {row.number: round_strips.healing(bytes(row.outcomes)) for row in rows}
        return {number: replicas for number, replicas in result.items() if replicas}


@pytest.fixture
def scene(make_run: Callable[..., Any], clock: Clock) -> Scene:
    return Scene(make_run(replicas=3), clock)


def story(scene: Scene) -> None:
    """Replica 2 dies in round 2, comes back in 3, catches up until 5, and misses 6 and 7."""
    scene.event(2, 0.1, "syncing")
    scene.event(2, 2.5, "lost")
    scene.event(2, 2.8, "provisioning")
    scene.event(2, 3.5, "syncing")
    for number in range(1, 8):
        scene.close(number, 0, 1, *([2] if number in (1, 5) else []))


def test_replica_that_catches_up_is_healing(scene: Scene) -> None:
    story(scene)
    scene.read()
    assert scene.healing() == {4: [2]}
    rows = {row["number"]: row for row in selectors.round_rows(scene.run)}
    assert (rows[4]["healing"], rows[3]["healing"], rows[6]["healing"]) == ([2], [], [])


def test_healing_ends_with_a_contribution_or_the_loss(scene: Scene) -> None:
    scene.event(1, 0.5, "syncing")
    scene.event(1, 2.5, "suspect")
    for number in range(1, 5):
        scene.close(number, 0, 2)
    scene.read()
    assert scene.healing() == {1: [1], 2: [1]}


@pytest.mark.parametrize("to", sorted(set(ReplicaState.values) - {"syncing"}))
def test_no_other_state_is_healing(scene: Scene, to: str) -> None:
    scene.event(1, 0.5, to)
    scene.close(1, 0, 2)
    scene.read()
    assert scene.healing() == {}


def test_late_contribution_replaces_healing(scene: Scene) -> None:
    scene.event(1, 0.5, "syncing")
    scene.close(1, 0, 2)
    scene.read()
    assert scene.healing() == {1: [1]}
    row = Round.objects.get(run=scene.run, number=1)
    row.contributions.create(replica=scene.run.replicas.get(number=1), state="late")
    assert round_strips.healing(bytes(round_strips.rebuild(row).outcomes)) == []
    scene.close(2, 0, 2)
    scene.read()
    assert scene.healing() == {}


def test_rebuild_keeps_healing(scene: Scene) -> None:
    story(scene)
    scene.read()
    assert round_strips.healing(
        bytes(round_strips.rebuild(scene.run.rounds.get(number=4)).outcomes)
    ) == [2]


def test_all_rounds_at_once_give_the_same_result(scene: Scene) -> None:
    """Like an import, which reads events after the rounds."""
    story(scene)
    scene.read()
    result = scene.healing()
    for row in Round.objects.filter(run=scene.run):
        codes = bytes(row.outcomes).replace(bytes([round_strips.HEALING]), b"\0")
        Round.objects.filter(pk=row.pk).update(outcomes=codes)
    assert scene.healing() == {}
    healing.mark(scene.run, scene.run.rounds.order_by("number").defer("timings"))
    assert scene.healing() == result


@pytest.mark.parametrize(("to", "before", "after"), [("computing", [1], []), ("syncing", [], [1])])
def test_event_that_is_committed_after_the_round_that_followed_it(
    scene: Scene, to: str, before: list[int], after: list[int]
) -> None:
    scene.event(1, 0.5, "syncing" if to == "computing" else "computing")
    scene.close(1, 0, 2)
    scene.close(2, 0)
    scene.read()
    assert scene.healing().get(2, []) == before
    scene.event(1, 1.5, to)
    scene.close(3, 0, 1, 2)
    scene.read()
    assert scene.healing().get(2, []) == after
    outcomes = bytes(Round.objects.get(run=scene.run, number=2).outcomes)
    assert len(outcomes) == (2 if after else 1), "as in an import"


@pytest.mark.parametrize("replicas", [3, 30])
def test_number_of_queries_does_not_grow(
    make_run: Callable[..., Any], clock: Clock, replicas: int
) -> None:
    scene = Scene(make_run(replicas=replicas), clock)
    scene.close(1, *range(replicas))
    scene.read()
    row = Round.objects.get(run=scene.run, number=1)
    with CaptureQueriesContext(connection) as queries:
        healing.mark(scene.run, [row])
    assert len(queries) == 2  # every replica contributed
    for number in range(1, replicas):
        scene.event(number, 1.5, "syncing")
    scene.close(2, 0)
    scene.read()
    row = Round.objects.get(run=scene.run, number=2)
    row.outcomes = bytes(row.outcomes).replace(bytes([round_strips.HEALING]), b"\0")
    with CaptureQueriesContext(connection) as queries:
        healing.mark(scene.run, [row])
    assert len(queries) == 4
    assert scene.healing() == {2: list(range(1, replicas))}
