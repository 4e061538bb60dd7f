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
from runs.ingest.commands import NoFreeNumber, send_save
from runs.ingest.limits import MAX_BLOCKS, work_of
from runs.ingest.round_rows import REFUSALS_NAMED
from runs.ingest.segment_store import WORK, transactions_of
from runs.ingest.system_metrics import usage_points
from runs.metrics.blocks import BLOCK_STEPS
from runs.models import Journal, MetricBlock
from tests.runs.ingest_harness import IngestHarness
from tests.runs.run_harness import identity

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2, total_rounds=70)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def test_a_plan_with_thousands_of_refusals_records_few_events(harness: Any) -> None:
    body = {
        "v": 3,
        "round": 1,
        "fragment": 0,
        "mode": "gather",
        "planner": vars(identity(0)),
        "contributions": [],
        "wall_s": 1.0,
        "refused": [
            {"replica": n, "incarnation": "x", "reason": "r", "kind": ""} for n in range(5000)
        ],
    }
    harness.bucket.store.put(keys.plan(1), json.dumps(body, separators=(",", ":")).encode())
    harness.bucket.commit(1, (0,))
    with CaptureQueriesContext(connection) as result:
        harness.tick()
    assert harness.run.committed_rounds == 1
    reported = harness.events("contribution_refused")
    assert len(reported) == REFUSALS_NAMED + 1
    assert "5000 contributions refused" in reported[0]
    assert len(result) < 500


def test_steps_in_thousands_of_blocks_are_refused(ingest: IngestHarness) -> None:
    ingest.run.group_settings |= {"total_rounds": 10**7}
    ingest.run.save()
    steps = tuple(range(1, 10**8, 10**5))
    count = len(steps)
    assert count > MAX_BLOCKS
    far = StepColumns(
        step=steps,
        round=(1,) * count,
        wall_s=(1e9,) * count,
        tokens=(1,) * count,
        loss=(1.0,) * count,
    )
    ingest.bucket.segment(0, 1, steps=far)
    ingest.ingest()
    [refused] = ingest.run.events.filter(kind="refused")
    assert f"steps in at most {MAX_BLOCKS} blocks of {BLOCK_STEPS}" in refused.message
    assert not MetricBlock.objects.filter(run=ingest.run).exists()


def test_a_replica_that_catches_up_with_a_jump_is_accepted(ingest: IngestHarness) -> None:
    ingest.run.group_settings |= {"total_rounds": 10**7}
    ingest.run.save()
    steps = (1, 2, 3, 5_000_001, 5_000_002)
    jump = StepColumns(
        step=steps, round=(1,) * 5, wall_s=(1e9,) * 5, tokens=(1,) * 5, loss=(1.0,) * 5
    )
    ingest.bucket.segment(0, 1, steps=jump)
    ingest.ingest()
    assert len(ingest.loss()) == 5


def test_rounds_in_thousands_of_blocks_have_a_limited_number_of_points() -> None:
    from diloco.protocol.telemetry import Segment
    from tests.runs.run_harness import Bucket

    kept: Any = _Kept()
    bucket = Bucket(kept)
    reports = [bucket.report(1 + n, step=1 + n * BLOCK_STEPS) for n in range(1000)]
    data = bucket.segment(0, 1, rounds=reports)
    points = usage_points([Segment.from_bytes(data)])
    assert len(points["bytes_up"]) == MAX_BLOCKS


class _Kept:
    def put(self, key: str, data: bytes) -> None:
        pass


def test_many_late_reports_are_checked_once_per_round_in_short_transactions(
    harness: Any,
) -> None:
    bucket = harness.bucket
    for replica in (0, 1):
        for n in range(1, 5):
            late = [bucket.report(k % 30 + 1, outcome="late") for k in range(1000)]
            bucket.segment(replica, n, rounds=late)
    with CaptureQueriesContext(connection) as result:
        harness.ingest()
    assert len(result) < 1500, "one query for each report would be eight thousand"
    assert [c.next_n for r in harness.run.replicas.all() for c in r.cursors.all()] == [5, 5]
    assert len(harness.events("replica_missed")) == 2


def test_a_transaction_has_a_limited_amount_of_work(ingest: IngestHarness) -> None:
    ingest.run.group_settings |= {"total_rounds": 10**7}
    ingest.run.save()
    for replica in (0, 1):
        for n in range(1, 13):
            ingest.bucket.segment(
                replica, n, rounds=[ingest.bucket.report(1, step=1) for _ in range(999)]
            )
    ingest.bucket.segment(0, 13, losses=(1.0,))
    from runs.models import TelemetryCursor

    cursors = [
        TelemetryCursor(replica=ingest.run.replicas.get(number=number), incarnation=name)
        for number, name in ingest.seen
    ]
    batches = [ingest.read_batch(cursor) for cursor in cursors]
    groups = transactions_of(batches)
    assert len(groups) > 5
    for group in groups:
        assert sum(work_of(s) for part in group for s in part.good) <= WORK
        numbers = [part.cursor.replica.number for part in group]
        assert len(set(numbers)) == len(numbers)
    reported = [(p.cursor.replica.number, n) for g in groups for p in g for n, _ in p.segments]
    assert sorted(reported) == sorted(
        (b.cursor.replica.number, n) for b in batches for n, _ in b.segments
    )
    assert [n for r, n in reported if r == 0] == list(range(1, 14))


def test_taken_command_numbers_are_tried_in_bounded_batches(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "TRIES", 20)
    first = harness.run.next_command
    for n in range(first, first + 50):
        harness.bucket.store.put(keys.control(n), b"not a command")
    lifecycle.save(harness.run, actor=harness.run.owner)
    harness.run.refresh_from_db()
    for _ in range(2):
        with pytest.raises(NoFreeNumber):
            send_save(harness.run, harness.bucket.store, harness.clock())
        harness.run.refresh_from_db()
    assert harness.run.save_sent_at is None
    send_save(harness.run, harness.bucket.store, harness.clock())
    sent = Command.read(harness.bucket.store, keys.control(first + 50))
    assert sent.command == "save"


def test_taken_journal_numbers_are_tried_in_bounded_batches(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "TRIES", 20)
    first = Journal.objects.get(run=harness.run).next_n
    for n in range(first, first + 50):
        harness.bucket.store.put(keys.journal(n), b"not an entry")
    lifecycle.describe(harness.run, notes="new", tags=(), actor=harness.run.owner)
    for _ in range(2):
        with pytest.raises(NoFreeNumber):
            journal.write_journal(harness.run, harness.bucket.store, now=harness.clock())
    assert journal.write_journal(harness.run, harness.bucket.store, now=harness.clock())
    data = harness.bucket.store.get(keys.journal(first + 50), limit=1 << 20)
    assert journal.Entry.from_bytes(data).run is not None
