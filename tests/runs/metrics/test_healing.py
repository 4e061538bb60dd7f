"""Who was catching up when a round closed is told apart from who was missing: as it is read, when
it is imported, and for what was stored before anybody asked."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps
from django.db import connection
from django.test.utils import CaptureQueriesContext

from runs.ingest.rounds import ingest_rounds
from runs.ingest.stores import store_for
from runs.metrics import healing, round_strips
from runs.metrics.changes import Changes
from runs.models import Event, Round
from runs.queries import selectors
from runs.states import ReplicaState
from tests.runs.world import Bucket, Clock

pytestmark = pytest.mark.django_db

ROUND_S = 10.0


class Scene:
    """Rounds of three replicas, of which round n closes n times :data:`ROUND_S` after the begin."""

    def __init__(self, run: Any, clock: Clock) -> None:
        self.run, self.begun = run, clock()
        self.store = store_for(run)

    def event(self, replica: int, at_round: float, to: str) -> None:
        Event.objects.create(
            run=self.run, replica=self.run.replicas.get(number=replica), kind="replica_state",
            at=self.begun + datetime.timedelta(seconds=at_round * ROUND_S), to_state=to,
        )  # fmt: skip

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
        found = {row.number: round_strips.healing(bytes(row.outcomes)) for row in rows}
        return {number: replicas for number, replicas in found.items() if replicas}


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


def test_a_round_without_who_catches_up(scene: Scene) -> None:
    story(scene)
    scene.read()
    assert scene.healing() == {4: [2]}
    rows = {row["number"]: row for row in selectors.round_rows(scene.run)}
    assert (rows[4]["healing"], rows[3]["healing"], rows[6]["healing"]) == ([2], [], [])


def test_it_heals_until_it_has_given_and_not_after_it_is_gone(scene: Scene) -> None:
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


def test_work_that_turns_up_later_is_late_and_no_longer_healing(scene: Scene) -> None:
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


def test_a_rebuild_keeps_it(scene: Scene) -> None:
    story(scene)
    scene.read()
    assert round_strips.healing(
        bytes(round_strips.rebuild(scene.run.rounds.get(number=4)).outcomes)
    ) == [2]


def test_all_rounds_at_once_come_to_the_same(scene: Scene) -> None:
    """As an import does, which reads the events after the rounds."""
    story(scene)
    scene.read()
    found = scene.healing()
    for row in Round.objects.filter(run=scene.run):
        codes = bytes(row.outcomes).replace(bytes([round_strips.HEALING]), b"\0")
        Round.objects.filter(pk=row.pk).update(outcomes=codes)
    assert scene.healing() == {}
    healing.mark(scene.run, scene.run.rounds.order_by("number").defer("timings"))
    assert scene.healing() == found


def test_what_was_stored_before_is_filled_in(scene: Scene) -> None:
    story(scene)
    scene.read()
    closed = Round.objects.get(run=scene.run, number=6)
    came = (closed.planned_at or scene.begun) + datetime.timedelta(seconds=1.5)
    replica = scene.run.replicas.get(number=2)
    closed.contributions.create(replica=replica, state="late", uploaded_at=came)
    round_strips.rebuild(closed)
    expected = list(scene.run.rounds.values_list("number", "outcomes", "lateness"))
    for row in Round.objects.filter(run=scene.run):
        codes = bytes(row.outcomes).replace(bytes([round_strips.HEALING]), b"\0")
        Round.objects.filter(pk=row.pk).update(outcomes=codes, lateness=b"")
    importlib.import_module("runs.migrations.0015_healing_lateness_usage").fill(apps, None)
    found = list(scene.run.rounds.values_list("number", "outcomes", "lateness"))
    assert [(n, bytes(a), bytes(b)) for n, a, b in found] == [
        (n, bytes(a), bytes(b)) for n, a, b in expected
    ]
    assert round_strips.latenesses(bytes(found[5][2])) == {2: 1.5}


@pytest.mark.parametrize("replicas", [3, 30])
def test_what_it_asks_does_not_grow(
    make_run: Callable[..., Any], clock: Clock, replicas: int
) -> None:
    scene = Scene(make_run(replicas=replicas), clock)
    scene.close(1, *range(replicas))
    scene.read()
    row = Round.objects.get(run=scene.run, number=1)
    with CaptureQueriesContext(connection) as asked:
        healing.mark(scene.run, [row])
    assert len(asked) == 1  # everybody gave
    for number in range(1, replicas):
        scene.event(number, 1.5, "syncing")
    scene.close(2, 0)
    scene.read()
    row = Round.objects.get(run=scene.run, number=2)
    with CaptureQueriesContext(connection) as asked:
        healing.mark(scene.run, [row])
    assert len(asked) == 4
    assert scene.healing() == {2: list(range(1, replicas))}
