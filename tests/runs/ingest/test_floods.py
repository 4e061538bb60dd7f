"""Records that are well formed and many, or reach far: their cost is bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from diloco.protocol import keys
from diloco.protocol.records import Command
from diloco.protocol.telemetry import StepColumns
from runs.actions import lifecycle
from runs.ingest import commands, journal
from runs.ingest.commands import Crowded, send_save
from runs.ingest.limits import MAX_BLOCKS, work_of
from runs.ingest.rounds import REFUSALS_NAMED
from runs.ingest.system_metrics import usage_points
from runs.ingest.telemetry import WORK, transactions_of
from runs.metrics.blocks import BLOCK_STEPS
from runs.models import Journal, MetricBlock
from tests.runs.desk import Desk
from tests.runs.world import identity

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    made = make_world(replicas=2, total_rounds=70)
    made.start()
    return made


def test_a_plan_that_refuses_thousands_is_a_few_events(world: Any) -> None:
    body = {
        "v": 2, "round": 1, "fragment": 0, "mode": "gather", "planner": vars(identity(0)),
        "contributions": [], "wall_s": 1.0,
        "refused": [
            {"replica": n, "incarnation": "x", "reason": "r", "kind": ""} for n in range(5000)
        ],
    }  # fmt: skip
    world.bucket.store.put(keys.plan(1), json.dumps(body, separators=(",", ":")).encode())
    world.bucket.commit(1, (0,))
    with CaptureQueriesContext(connection) as found:
        world.tick()
    assert world.run.committed_rounds == 1
    told = world.events("contribution_refused")
    assert len(told) == REFUSALS_NAMED + 1
    assert "5000 contributions refused" in told[0]
    assert len(found) < 500


def test_steps_that_reach_into_thousands_of_blocks_are_refused_by_name(desk: Desk) -> None:
    desk.run.group_settings |= {"total_rounds": 10**7}
    desk.run.save()
    steps = tuple(range(1, 10**8, 10**5))
    count = len(steps)
    assert count > MAX_BLOCKS
    far = StepColumns(
        step=steps, round=(1,) * count, wall_s=(1e9,) * count, tokens=(1,) * count,
        loss=(1.0,) * count,
    )  # fmt: skip
    desk.bucket.segment(0, 1, steps=far)
    desk.ingest()
    [refused] = desk.run.events.filter(kind="refused")
    assert f"steps in at most {MAX_BLOCKS} blocks of {BLOCK_STEPS}" in refused.message
    assert not MetricBlock.objects.filter(run=desk.run).exists()


def test_one_that_catches_up_with_a_jump_is_taken(desk: Desk) -> None:
    desk.run.group_settings |= {"total_rounds": 10**7}
    desk.run.save()
    steps = (1, 2, 3, 5_000_001, 5_000_002)
    jump = StepColumns(
        step=steps, round=(1,) * 5, wall_s=(1e9,) * 5, tokens=(1,) * 5, loss=(1.0,) * 5
    )
    desk.bucket.segment(0, 1, steps=jump)
    desk.ingest()
    assert len(desk.loss()) == 5


def test_rounds_that_reach_into_thousands_of_blocks_have_a_limited_number_of_points() -> None:
    from diloco.protocol.telemetry import Segment
    from tests.runs.world import Bucket

    kept: Any = _Kept()
    bucket = Bucket(kept)
    reports = [bucket.report(1 + n, step=1 + n * BLOCK_STEPS) for n in range(1000)]
    data = bucket.segment(0, 1, rounds=reports)
    points = usage_points([Segment.from_bytes(data)])
    assert len(points["bytes_up"]) == MAX_BLOCKS


class _Kept:
    def put(self, key: str, data: bytes) -> None:
        pass


def test_many_late_reports_are_looked_up_once_a_round_and_stored_in_short_transactions(
    world: Any,
) -> None:
    bucket = world.bucket
    for replica in (0, 1):
        for n in range(1, 5):
            late = [bucket.report(k % 30 + 1, outcome="late") for k in range(1000)]
            bucket.segment(replica, n, rounds=late)
    with CaptureQueriesContext(connection) as found:
        world.ingest()
    assert len(found) < 1500, "one query for each report would be eight thousand"
    assert [c.next_n for r in world.run.replicas.all() for c in r.cursors.all()] == [5, 5]
    assert len(world.events("replica_missed")) == 2


def test_a_transaction_has_a_limited_amount_of_work(desk: Desk) -> None:
    from runs.ingest.limits import RunBounds
    from runs.ingest.telemetry import read_batch

    desk.run.group_settings |= {"total_rounds": 10**7}
    desk.run.save()
    for replica in (0, 1):
        for n in range(1, 13):
            desk.bucket.segment(
                replica, n, rounds=[desk.bucket.report(1, step=1) for _ in range(999)]
            )
    desk.bucket.segment(0, 13, losses=(1.0,))
    from runs.models import TelemetryCursor

    cursors = [
        TelemetryCursor(replica=desk.run.replicas.get(number=number), incarnation=name)
        for number, name in desk.seen
    ]
    bounds = RunBounds.of(desk.run)
    batches = [read_batch(desk.bucket.store, cursor, bounds) for cursor in cursors]
    groups = transactions_of(batches)
    assert len(groups) > 5
    for group in groups:
        assert sum(work_of(s) for part in group for s in part.good) <= WORK
        numbers = [part.cursor.replica.number for part in group]
        assert len(set(numbers)) == len(numbers)
    told = [(p.cursor.replica.number, n) for g in groups for p in g for n, _ in p.segments]
    assert sorted(told) == sorted(
        (b.cursor.replica.number, n) for b in batches for n, _ in b.segments
    )
    assert [n for r, n in told if r == 0] == list(range(1, 14))


def test_numbers_of_commands_that_are_taken_are_tried_some_at_a_time(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "TRIES", 20)
    first = world.run.next_command
    for n in range(first, first + 50):
        world.bucket.store.put(keys.control(n), b"not a command")
    lifecycle.save(world.run, actor=world.run.owner)
    world.run.refresh_from_db()
    for _ in range(2):
        with pytest.raises(Crowded):
            send_save(world.run, world.bucket.store, world.clock())
        world.run.refresh_from_db()
    assert world.run.save_sent_at is None
    send_save(world.run, world.bucket.store, world.clock())
    sent = Command.read(world.bucket.store, keys.control(first + 50))
    assert sent.command == "save"


def test_numbers_of_the_journal_that_are_taken_are_tried_some_at_a_time(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "TRIES", 20)
    first = Journal.objects.get(run=world.run).next_n
    for n in range(first, first + 50):
        world.bucket.store.put(keys.journal(n), b"not an entry")
    lifecycle.describe(world.run, notes="new", tags=(), actor=world.run.owner)
    for _ in range(2):
        with pytest.raises(Crowded):
            journal.write_journal(world.run, world.bucket.store, now=world.clock())
    assert journal.write_journal(world.run, world.bucket.store, now=world.clock())
    data = world.bucket.store.get(keys.journal(first + 50), limit=1 << 20)
    assert journal.Entry.from_bytes(data).run is not None
