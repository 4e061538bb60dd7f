"""Telemetry into tables, exactly once, whatever a segment holds and whenever a worker dies."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from runs.ingest import telemetry
from runs.ingest.limits import RunBounds
from runs.ingest.telemetry import STALE_AFTER, read_batch, store_batches
from runs.metrics.changes import Changes
from runs.models import Event, LogLine, MetricBlock, TelemetryCursor
from runs.queries.selectors import points
from tests.runs.desk import Desk
from tests.runs.world import DIGEST, incarnation

pytestmark = pytest.mark.django_db


def test_segments_become_points_log_lines_and_newest_values(desk: Desk) -> None:
    desk.bucket.segment(0, 1, losses=[5.0, 4.0], logs=(desk.bucket.log("hello"),))
    desk.bucket.segment(0, 2, losses=[3.0], first=3)
    changes = desk.ingest()
    assert desk.loss() == [5.0, 4.0, 3.0]
    assert desk.loss(1) == []
    replica = desk.run.replicas.get(number=0)
    assert (replica.step, replica.round, replica.tokens, replica.loss) == (3, 1, 3000, 4.0)
    assert replica.tokens_per_s == pytest.approx(1000)
    assert LogLine.objects.get().message == "hello"
    assert desk.cursor().next_n == 3
    assert desk.run.last_seen_at == desk.clock()
    assert desk.run.first_step_at.timestamp() == desk.bucket.wall_s + 1
    assert {(series, number, len(p)) for series, number, p in changes.points} == {
        ("loss", 0, 3), ("lr", 0, 3),
    }  # fmt: skip


def test_a_batch_that_is_stored_twice_is_stored_once(desk: Desk) -> None:
    desk.ingest()
    report = desk.bucket.report(1)
    desk.bucket.segment(0, 1, losses=[5.0], rounds=(report,), logs=(desk.bucket.log("x"),))
    twins = [read_batch(desk.bucket.store, desk.cursor(), RunBounds.of(desk.run)) for _ in range(2)]
    stored = [store_batches(desk.run, [b], now=desk.clock(), changes=Changes()) for b in twins]
    assert stored == [{desk.cursor().pk}, set()]
    desk.ingest()
    assert (desk.loss(), LogLine.objects.count()) == ([5.0], 1)
    assert (desk.run.bytes_up, desk.run.bytes_down) == (100, 300)
    assert desk.run.phase_s == {"compute": 6.0, "wait": 2.0}


@pytest.mark.parametrize("step", ["add_of_many", "store_reports", "record_event", "clean_text"])
def test_a_worker_that_dies_in_the_middle_leaves_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    nan = math.nan if step == "record_event" else 4.0
    report = desk.bucket.report(1)
    logs = (desk.bucket.log("x"),)
    desk.bucket.segment(0, 1, losses=[5.0, nan], rounds=(report,), logs=logs)

    def die(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"runs.ingest.segments.{step}", die)
        with pytest.raises(KeyboardInterrupt):
            desk.ingest()
    desk.run.refresh_from_db()
    assert desk.cursor().next_n == 1
    assert not MetricBlock.objects.exists()
    assert not desk.run.rounds.exists()
    assert (desk.run.bytes_up, desk.run.last_seen_at) == (0, None)
    desk.ingest()
    assert (desk.cursor().next_n, len(desk.loss()), desk.run.bytes_up) == (2, 2, 100)


def test_a_gap_is_waited_for(desk: Desk) -> None:
    desk.bucket.segment(0, 2, losses=[4.0], first=2)
    desk.ingest()
    assert (desk.loss(), desk.cursor().next_n) == ([], 1)
    desk.bucket.segment(0, 1, losses=[5.0])
    desk.ingest()
    assert (desk.loss(), desk.cursor().next_n) == ([5.0, 4.0], 3)


def test_a_backlog_is_worked_off_in_pieces(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SEGMENTS_PER_TICK", 2)
    for n in range(1, 6):
        desk.bucket.segment(0, n, losses=[float(n)], first=n)
    desk.ended = frozenset({0, 1})
    for expected in (2, 4, 5, 5):
        desk.ingest()
        assert len(desk.loss()) == expected
    assert desk.cursor().ended


def test_a_loss_that_is_no_number_is_kept_told_once_and_null_in_json(desk: Desk) -> None:
    desk.bucket.segment(0, 1, losses=[5.0, math.nan, math.inf])
    desk.ingest()
    desk.bucket.segment(0, 2, losses=[math.nan], first=4)
    desk.ingest()
    assert [math.isfinite(v) for v in desk.loss()] == [True, False, False, False]
    [event] = Event.objects.filter(kind="nonfinite")
    assert event.level == "error"
    assert event.message == "expected a finite loss, found nan at step 2"
    assert desk.run.replicas.get(number=0).loss == 5.0
    column = points(desk.run, "loss", replica=0)
    assert column["value"] == [5.0, None, None, None]
    assert column["nonfinite"] == [[1, "nan"], [2, "inf"], [3, "nan"]]
    json.dumps(column, allow_nan=False)


def test_reports_fill_the_round_and_the_header(desk: Desk) -> None:
    desk.bucket.segment(0, 1, rounds=(desk.bucket.report(1), desk.bucket.report(2)))
    desk.bucket.segment(1, 1, rounds=(desk.bucket.report(1, outcome="late"),))
    changes = desk.ingest()
    assert changes.rounds == {1, 2}
    first = desk.run.rounds.get(number=1)
    states = list(first.contributions.order_by("replica").values_list("state", flat=True))
    assert states == ["included", "late"]
    contribution = first.contributions.get(replica__number=0)
    assert contribution.phases == {"compute": 6.0, "wait": 2.0}
    assert (contribution.bytes_up, contribution.requests) == (100, 9)
    assert (contribution.norm, contribution.update_norm) == (1.5, 0.5)
    assert desk.run.phase_s == {"compute": 18.0, "wait": 6.0}
    assert (desk.run.bytes_up, desk.run.bytes_down) == (300, 900)
    assert desk.run.replicas.get(number=0).wait_fraction == 0.25


def test_three_rounds_missed_in_a_row_are_told_once(desk: Desk) -> None:
    outcomes = ["late", "late", "included", "late", "late", "late", "late"]
    for n, outcome in enumerate(outcomes, start=1):
        desk.bucket.segment(0, n, rounds=(desk.bucket.report(n, outcome=outcome),))
        desk.ingest()
    [event] = Event.objects.filter(kind="replica_missed")
    assert event.level == "warning"
    assert event.message.startswith("3 rounds in a row, up to round 6, were committed without")


def test_phases_we_do_not_know_are_left_out(desk: Desk) -> None:
    phases = {"start": 2.0, "compute": 1.0, "dream": 9.0, "wait": math.nan, "upload": -1.0}
    desk.bucket.segment(0, 1, rounds=(desk.bucket.report(1, phases=phases),))
    desk.ingest()
    assert desk.run.phase_s == {"start": 2.0, "compute": 1.0}


def test_weights_that_differ_are_an_error_once(desk: Desk) -> None:
    desk.bucket.segment(0, 1, rounds=(desk.bucket.report(1),))
    other = desk.bucket.report(1, weights_digest="e" * 64)
    desk.bucket.segment(1, 1, rounds=(other, other))
    desk.ingest()
    [event] = Event.objects.filter(kind="weights_mismatch")
    assert event.level == "error"
    assert f"expected digest {DIGEST}" in event.message
    assert f"found {'e' * 64} on replica 1" in event.message
    row = desk.run.rounds.get(number=1)
    assert (row.digest_mismatch, row.weights_digest) == (True, DIGEST)


def test_evaluations_are_the_run_s_own_series(desk: Desk) -> None:
    desk.run.rounds.create(number=2, tokens_total=4000)
    type(desk.run).objects.update(next_round=3)
    evaluation = desk.bucket.evaluation
    desk.bucket.segment(0, 1, evaluations=(evaluation(0, 5.5), evaluation(2, 4.5)))
    desk.bucket.segment(1, 1, evaluations=(evaluation(1, 5.0),))
    desk.ingest()
    column = points(desk.run, "eval_loss")
    assert (column["step"], column["value"]) == ([0, 10, 20], [5.5, 5.0, 4.5])
    assert column["tokens"][2] == 4000
    assert (desk.run.eval_loss, desk.run.eval_round) == (4.5, 2)
    assert desk.run.rounds.get(number=2).eval_loss == 4.5


def test_a_relaunched_replica_repeats_steps_and_the_newest_word_stands(desk: Desk) -> None:
    desk.bucket.segment(0, 1, losses=[5.0, 4.0, 3.0])
    desk.ingest()
    desk.seen.append((0, incarnation(0, seq=2)))
    desk.run.replicas.filter(number=0).update(incarnation=incarnation(0, seq=2))
    desk.bucket.segment(0, 1, losses=[4.2, 3.2], first=2, seq=2)
    desk.ingest()
    assert desk.loss() == [5.0, 4.2, 3.2]
    assert desk.cursor(seq=2).next_n == 2
    # What the old process left behind does not describe the new one.
    desk.bucket.segment(0, 2, losses=[9.0], first=4)
    desk.ingest()
    assert desk.run.replicas.get(number=0).step == 3


def test_a_cursor_ends_with_the_last_segment_the_job_or_a_successor(desk: Desk) -> None:
    desk.bucket.segment(0, 1, last=True)
    desk.ingest()
    assert desk.cursor(0).ended
    assert not desk.cursor(1).ended
    desk.ended = frozenset({1})
    desk.ingest()
    assert desk.cursor(1).ended
    desk.ended = frozenset()
    desk.seen += [(1, incarnation(1, seq=2)), (1, incarnation(1, seq=3))]
    desk.ingest()
    assert not desk.cursor(1, seq=2).ended
    desk.clock.pass_s(STALE_AFTER.total_seconds() + 1)
    desk.ingest()
    assert desk.cursor(1, seq=2).ended
    assert not desk.cursor(1, seq=3).ended


def test_strangers_incarnations_are_not_read(desk: Desk) -> None:
    desk.seen = [(77, incarnation(77))]
    desk.ingest()
    assert not TelemetryCursor.objects.exists()
