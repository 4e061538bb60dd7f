"""All replicas of a tick in one transaction: a constant number of statements, the newest value of a
step wins, and a segment that cannot be stored does not block other replicas."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from runs.ingest import segment_store, segments
from runs.metrics.changes import Changes
from runs.models import Contribution, LogLine, QuarantinedRecord
from tests.runs.ingest_harness import IngestHarness
from tests.runs.run_harness import incarnation

pytestmark = pytest.mark.django_db


def full(ingest: IngestHarness, replica: int, n: int, **more: Any) -> None:
    """Write a segment with every kind of data."""
    ingest.bucket.segment(
        replica,
        n,
        losses=[5.0 - n],
        first=n,
        rounds=(ingest.bucket.report(n),),
        logs=(ingest.bucket.log(f"{replica}: {n}"),),
        **more,
    )


def test_statements_do_not_depend_on_the_number_of_replicas(ingest: IngestHarness) -> None:
    for replica in (0, 1):
        full(ingest, replica, 1)
    ingest.ingest()

    def statements(*replicas: int) -> int:
        n = ingest.cursor(1).next_n
        for replica in (0, 1):
            if replica in replicas:
                full(ingest, replica, n)
            else:
                ingest.bucket.segment(replica, n)
        with CaptureQueriesContext(connection) as result:
            ingest.ingest()
        return len(result)

    assert statements(0, 1) == statements(1)
    assert Contribution.objects.filter(replica__number=1).count() == 3


def test_two_processes_of_a_replica_in_one_tick(ingest: IngestHarness) -> None:
    ingest.seen.append((0, incarnation(0, seq=2)))
    ingest.bucket.segment(0, 1, losses=[5.0, 4.0, 3.0], rounds=(ingest.bucket.report(1),))
    later = ingest.bucket.report(1, bytes_up=7)
    ingest.bucket.segment(0, 1, losses=[4.2, 3.2], first=2, seq=2, rounds=(later,))
    ingest.ingest()
    assert ingest.loss() == [5.0, 4.2, 3.2]
    contribution = Contribution.objects.get()
    assert (contribution.incarnation, contribution.bytes_up) == (incarnation(0), 100)
    assert ingest.run.bytes_up == 107


def test_a_segment_that_cannot_be_stored_does_not_block_others(
    ingest: IngestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(ingest, 0, 1)
    full(ingest, 1, 1)
    honest = segments.clean_text

    def fail(text: str, *limit: int) -> str:
        if text == "1: 1":
            raise RuntimeError("an unforeseen error")
        return honest(text, *limit)

    with monkeypatch.context() as patch:
        patch.setattr(segments, "clean_text", fail)
        ingest.ingest()
    [row] = QuarantinedRecord.objects.all()
    assert (row.failures, row.quarantined_at) == (1, None)
    assert (ingest.cursor(0).next_n, ingest.cursor(1).next_n) == (2, 1)
    assert [line.message for line in LogLine.objects.all()] == ["0: 1"]
    ingest.run.refresh_from_db()
    assert ingest.run.bytes_up == 100
    changes = ingest.ingest()
    assert (ingest.cursor(1).next_n, ingest.run.bytes_up) == (2, 200)
    assert not QuarantinedRecord.objects.exists()
    assert {number for _, number, _ in changes.points if number is not None} == {1}


def test_a_worker_that_loses_one_race_stores_the_other_batches(ingest: IngestHarness) -> None:
    ingest.ingest()
    full(ingest, 0, 1)
    full(ingest, 1, 1)
    batches = [ingest.read_batch(ingest.cursor(n)) for n in (0, 1)]
    changes = Changes()
    store = {"now": ingest.clock(), "changes": changes}
    assert segment_store.store_batches(ingest.run, batches[:1], **store) == {ingest.cursor(0).pk}
    assert segment_store.store_batches(ingest.run, batches, **store) == {ingest.cursor(1).pk}
    ingest.run.refresh_from_db()
    assert (ingest.run.bytes_up, ingest.loss(0), ingest.loss(1)) == (200, [4.0], [4.0])
