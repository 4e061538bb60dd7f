"""Telemetry is stored exactly once, for any content of a segment and any crash of a worker."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from runs.ingest import telemetry
from runs.ingest.segment_store import store_batches
from runs.ingest.telemetry import STALE_AFTER
from runs.metrics.changes import Changes
from runs.models import Event, LogLine, MetricBlock, TelemetryCursor
from runs.queries.selectors import points
from tests.runs.ingest_harness import IngestHarness
from tests.runs.run_harness import DIGEST, incarnation

pytestmark = pytest.mark.django_db


def test_segments_become_points_log_lines_and_newest_values(ingest: IngestHarness) -> None:
    ingest.bucket.segment(0, 1, losses=[5.0, 4.0], logs=(ingest.bucket.log("hello"),))
    ingest.bucket.segment(0, 2, losses=[3.0], first=3)
    changes = ingest.ingest()
    assert ingest.loss() == [5.0, 4.0, 3.0]
    assert ingest.loss(1) == []
    replica = ingest.run.replicas.get(number=0)
    assert (replica.step, replica.round, replica.tokens, replica.loss) == (3, 1, 3000, 4.0)
    assert replica.tokens_per_s == pytest.approx(1000)
    assert LogLine.objects.get().message == "hello"
    assert ingest.cursor().next_n == 3
    assert ingest.run.last_seen_at == ingest.clock()
    assert ingest.run.first_step_at.timestamp() == ingest.bucket.wall_s + 1
    assert {(series, number, len(p)) for series, number, p in changes.points} == {
        ("loss", 0, 3),
        ("lr", 0, 3),
    }


def test_a_batch_that_is_stored_twice_is_stored_once(ingest: IngestHarness) -> None:
    ingest.ingest()
    report = ingest.bucket.report(1)
    ingest.bucket.segment(0, 1, losses=[5.0], rounds=(report,), logs=(ingest.bucket.log("x"),))
    duplicates = [ingest.read_batch(ingest.cursor()) for _ in range(2)]
    stored = [
        store_batches(ingest.run, [b], now=ingest.clock(), changes=Changes()) for b in duplicates
    ]
    assert stored == [{ingest.cursor().pk}, set()]
    ingest.ingest()
    assert (ingest.loss(), LogLine.objects.count()) == ([5.0], 1)
    assert (ingest.run.bytes_up, ingest.run.bytes_down) == (100, 300)
    assert ingest.run.phase_s == {"compute": 6.0, "wait": 2.0}


@pytest.mark.parametrize("step", ["add_of_many", "store_reports", "record_event", "clean_text"])
def test_a_worker_that_dies_midway_stores_nothing(
    ingest: IngestHarness, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    nan = math.nan if step == "record_event" else 4.0
    report = ingest.bucket.report(1)
    logs = (ingest.bucket.log("x"),)
    ingest.bucket.segment(0, 1, losses=[5.0, nan], rounds=(report,), logs=logs)

    def die(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"runs.ingest.segments.{step}", die)
        with pytest.raises(KeyboardInterrupt):
            ingest.ingest()
    ingest.run.refresh_from_db()
    assert ingest.cursor().next_n == 1
    assert not MetricBlock.objects.exists()
    assert not ingest.run.rounds.exists()
    assert (ingest.run.bytes_up, ingest.run.last_seen_at) == (0, None)
    ingest.ingest()
    assert (ingest.cursor().next_n, len(ingest.loss()), ingest.run.bytes_up) == (2, 2, 100)


def test_later_segments_wait_for_a_missing_one(ingest: IngestHarness) -> None:
    ingest.bucket.segment(0, 2, losses=[4.0], first=2)
    ingest.ingest()
    assert (ingest.loss(), ingest.cursor().next_n) == ([], 1)
    ingest.bucket.segment(0, 1, losses=[5.0])
    ingest.ingest()
    assert (ingest.loss(), ingest.cursor().next_n) == ([5.0, 4.0], 3)


def test_a_backlog_is_read_over_several_ticks(
    ingest: IngestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "SEGMENTS_PER_TICK", 2)
    for n in range(1, 6):
        ingest.bucket.segment(0, n, losses=[float(n)], first=n)
    ingest.ended = frozenset({0, 1})
    for expected in (2, 4, 5, 5):
        ingest.ingest()
        assert len(ingest.loss()) == expected
    assert ingest.cursor().ended


def test_a_nan_loss_is_stored_reported_once_and_null_in_json(ingest: IngestHarness) -> None:
    ingest.bucket.segment(0, 1, losses=[5.0, math.nan, math.inf])
    ingest.ingest()
    ingest.bucket.segment(0, 2, losses=[math.nan], first=4)
    ingest.ingest()
    assert [math.isfinite(v) for v in ingest.loss()] == [True, False, False, False]
    [event] = Event.objects.filter(kind="nonfinite")
    assert event.level == "error"
    assert event.message == "expected a finite loss, found nan at step 2"
    assert ingest.run.replicas.get(number=0).loss == 5.0
    column = points(ingest.run, "loss", replica=0)
    assert column["value"] == [5.0, None, None, None]
    assert column["nonfinite"] == [[1, "nan"], [2, "inf"], [3, "nan"]]
    json.dumps(column, allow_nan=False)


def test_reports_fill_the_round_and_the_header(ingest: IngestHarness) -> None:
    ingest.bucket.segment(0, 1, rounds=(ingest.bucket.report(1), ingest.bucket.report(2)))
    ingest.bucket.segment(1, 1, rounds=(ingest.bucket.report(1, outcome="late"),))
    changes = ingest.ingest()
    assert changes.rounds == {1, 2}
    first = ingest.run.rounds.get(number=1)
    states = list(first.contributions.order_by("replica").values_list("state", flat=True))
    assert states == ["included", "late"]
    contribution = first.contributions.get(replica__number=0)
    assert contribution.phases == {"compute": 6.0, "wait": 2.0}
    assert (contribution.bytes_up, contribution.requests) == (100, 9)
    assert (contribution.norm, contribution.update_norm) == (1.5, 0.5)
    assert ingest.run.phase_s == {"compute": 18.0, "wait": 6.0}
    assert (ingest.run.bytes_up, ingest.run.bytes_down) == (300, 900)
    assert ingest.run.replicas.get(number=0).wait_fraction == 0.25


def test_three_missed_rounds_in_a_row_are_reported_once(ingest: IngestHarness) -> None:
    outcomes = ["late", "late", "included", "late", "late", "late", "late"]
    for n, outcome in enumerate(outcomes, start=1):
        ingest.bucket.segment(0, n, rounds=(ingest.bucket.report(n, outcome=outcome),))
        ingest.ingest()
    [event] = Event.objects.filter(kind="replica_missed")
    assert event.level == "warning"
    assert event.message.startswith("3 rounds in a row, up to round 6, were committed without")


def test_unknown_phases_are_ignored(ingest: IngestHarness) -> None:
    phases = {"start": 2.0, "compute": 1.0, "dream": 9.0, "wait": math.nan, "upload": -1.0}
    ingest.bucket.segment(0, 1, rounds=(ingest.bucket.report(1, phases=phases),))
    ingest.ingest()
    assert ingest.run.phase_s == {"start": 2.0, "compute": 1.0}


def test_weights_that_differ_are_an_error_once(ingest: IngestHarness) -> None:
    ingest.bucket.segment(0, 1, rounds=(ingest.bucket.report(1),))
    other = ingest.bucket.report(1, weights_digest="e" * 64)
    ingest.bucket.segment(1, 1, rounds=(other, other))
    ingest.ingest()
    [event] = Event.objects.filter(kind="weights_mismatch")
    assert event.level == "error"
    assert f"expected digest {DIGEST}" in event.message
    assert f"found {'e' * 64} on replica 1" in event.message
    row = ingest.run.rounds.get(number=1)
    assert (row.digest_mismatch, row.weights_digest) == (True, DIGEST)


def test_evaluations_are_a_series_of_the_run(ingest: IngestHarness) -> None:
    ingest.run.rounds.create(number=2, tokens_total=4000)
    type(ingest.run).objects.update(next_round=3)
    evaluation = ingest.bucket.evaluation
    ingest.bucket.segment(0, 1, evaluations=(evaluation(0, 5.5), evaluation(2, 4.5)))
    ingest.bucket.segment(1, 1, evaluations=(evaluation(1, 5.0),))
    ingest.ingest()
    column = points(ingest.run, "eval_loss")
    assert (column["step"], column["value"]) == ([0, 10, 20], [5.5, 5.0, 4.5])
    assert column["tokens"][2] == 4000
    assert (ingest.run.eval_loss, ingest.run.eval_round) == (4.5, 2)
    assert ingest.run.rounds.get(number=2).eval_loss == 4.5


def test_repeated_steps_of_a_relaunched_replica_replace_earlier_ones(ingest: IngestHarness) -> None:
    ingest.bucket.segment(0, 1, losses=[5.0, 4.0, 3.0])
    ingest.ingest()
    ingest.seen.append((0, incarnation(0, seq=2)))
    ingest.run.replicas.filter(number=0).update(incarnation=incarnation(0, seq=2))
    ingest.bucket.segment(0, 1, losses=[4.2, 3.2], first=2, seq=2)
    ingest.ingest()
    assert ingest.loss() == [5.0, 4.2, 3.2]
    assert ingest.cursor(seq=2).next_n == 2
    # The last segments of the old process do not describe the new one.
    ingest.bucket.segment(0, 2, losses=[9.0], first=4)
    ingest.ingest()
    assert ingest.run.replicas.get(number=0).step == 3


def test_a_cursor_ends_with_the_last_segment_the_job_or_a_successor(ingest: IngestHarness) -> None:
    ingest.bucket.segment(0, 1, last=True)
    ingest.ingest()
    assert ingest.cursor(0).ended
    assert not ingest.cursor(1).ended
    ingest.ended = frozenset({1})
    ingest.ingest()
    assert ingest.cursor(1).ended
    ingest.ended = frozenset()
    ingest.seen += [(1, incarnation(1, seq=2)), (1, incarnation(1, seq=3))]
    ingest.ingest()
    assert not ingest.cursor(1, seq=2).ended
    ingest.clock.pass_s(STALE_AFTER.total_seconds() + 1)
    ingest.ingest()
    assert ingest.cursor(1, seq=2).ended
    assert not ingest.cursor(1, seq=3).ended


def test_incarnations_of_unknown_replicas_are_not_read(ingest: IngestHarness) -> None:
    ingest.seen = [(77, incarnation(77))]
    ingest.ingest()
    assert not TelemetryCursor.objects.exists()
