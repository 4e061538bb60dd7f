"""All replicas of a tick in one transaction: as many statements for two as for one, the newest word
on a step stands, and what cannot be stored of one does not keep the others' out."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from runs.ingest import segments, telemetry
from runs.ingest.limits import RunBounds
from runs.models import Contribution, LogLine, QuarantinedRecord
from tests.runs.desk import Desk
from tests.runs.world import incarnation

pytestmark = pytest.mark.django_db


def full(desk: Desk, replica: int, n: int, **more: Any) -> None:
    """A segment of everything that a replica tells."""
    desk.bucket.segment(
        replica, n, losses=[5.0 - n], first=n, rounds=(desk.bucket.report(n),),
        logs=(desk.bucket.log(f"{replica}: {n}"),), **more,
    )  # fmt: skip


def test_statements_do_not_depend_on_the_number_of_replicas(desk: Desk) -> None:
    for replica in (0, 1):
        full(desk, replica, 1)
    desk.ingest()

    def statements(*replicas: int) -> int:
        n = desk.cursor(1).next_n
        for replica in (0, 1):
            if replica in replicas:
                full(desk, replica, n)
            else:
                desk.bucket.segment(replica, n)
        with CaptureQueriesContext(connection) as found:
            desk.ingest()
        return len(found)

    assert statements(0, 1) == statements(1)
    assert Contribution.objects.filter(replica__number=1).count() == 3


def test_two_processes_of_a_replica_in_one_tick(desk: Desk) -> None:
    desk.seen.append((0, incarnation(0, seq=2)))
    desk.bucket.segment(0, 1, losses=[5.0, 4.0, 3.0], rounds=(desk.bucket.report(1),))
    later = desk.bucket.report(1, bytes_up=7)
    desk.bucket.segment(0, 1, losses=[4.2, 3.2], first=2, seq=2, rounds=(later,))
    desk.ingest()
    assert desk.loss() == [5.0, 4.2, 3.2]
    contribution = Contribution.objects.get()
    assert (contribution.incarnation, contribution.bytes_up) == (incarnation(0), 100)
    assert desk.run.bytes_up == 107


def test_what_cannot_be_stored_does_not_keep_the_others_out(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(desk, 0, 1)
    full(desk, 1, 1)
    honest = segments.clean_text

    def fail(text: str, *limit: int) -> str:
        if text == "1: 1":
            raise RuntimeError("expected a fault that somebody thought of")
        return honest(text, *limit)

    with monkeypatch.context() as patch:
        patch.setattr(segments, "clean_text", fail)
        desk.ingest()
    [row] = QuarantinedRecord.objects.all()
    assert (row.failures, row.quarantined_at) == (1, None)
    assert (desk.cursor(0).next_n, desk.cursor(1).next_n) == (2, 1)
    assert [line.message for line in LogLine.objects.all()] == ["0: 1"]
    desk.run.refresh_from_db()
    assert desk.run.bytes_up == 100
    changes = desk.ingest()
    assert (desk.cursor(1).next_n, desk.run.bytes_up) == (2, 200)
    assert not QuarantinedRecord.objects.exists()
    assert {number for _, number, _ in changes.points if number is not None} == {1}


def test_a_worker_that_lost_one_race_stores_the_others(desk: Desk) -> None:
    desk.ingest()
    full(desk, 0, 1)
    full(desk, 1, 1)
    bounds = RunBounds.of(desk.run)
    batches = [telemetry.read_batch(desk.bucket.store, desk.cursor(n), bounds) for n in (0, 1)]
    changes = telemetry.Changes()
    store = {"now": desk.clock(), "changes": changes}
    assert telemetry.store_batches(desk.run, batches[:1], **store) == {desk.cursor(0).pk}
    assert telemetry.store_batches(desk.run, batches, **store) == {desk.cursor(1).pk}
    desk.run.refresh_from_db()
    assert (desk.run.bytes_up, desk.loss(0), desk.loss(1)) == (200, [4.0], [4.0])
