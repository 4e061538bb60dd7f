"""Jobs of evaluations: one at a time, whatever dies when."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from django.utils import timezone

from diloco.exit_codes import EX_CONFIG
from diloco.protocol import keys
from diloco.store.base import Store, StoreUnavailable
from executors.base import (
    AccountError,
    Cause,
    JobState,
    LaunchRefused,
    PendingCause,
    ReplicaStatus,
)
from runs.actions import deletion, evaluations
from runs.evaluations import advance, jobs, schedule
from runs.exceptions import ActionRefused, LaunchLater
from runs.models import Evaluation, EvaluationAttempt, Run
from runs.queries.evaluations import plan_named
from runs.reconcile.orphan_reaper import orphans
from runs.states import RunState
from tests.runs.evaluations.evaluation_harness import Evaluations, Killed


def test_two_evaluations_of_a_run_do_not_run_at_once(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.checkpoint(10)
    schedule.call_for_due()
    advance.advance(Evaluation.objects.get(round=10).pk)  # the newer one comes first
    assert harness.states() == {5: "queued", 10: "queued"}
    harness.clock.pass_s(3)
    harness.tick()
    harness.tick()
    assert harness.states() == {5: "running", 10: "queued"}
    harness.write(5, 2.0)
    harness.end()
    harness.tick()
    harness.tick()
    assert harness.states() == {5: "succeeded", 10: "running"}


@pytest.mark.parametrize("fatal", ["begin", "launched", "polled", "closed", "stored"])
def test_a_worker_that_is_killed_leaves_one_job_and_one_result(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch, fatal: str
) -> None:
    """Killed after each write or call; the next workers finish the evaluation."""
    calls = {
        "begin": (jobs, "begin_attempt"),
        "launched": (harness.executor, "ensure"),
        "polled": (harness.executor, "poll"),
        "closed": (jobs, "close"),
        "stored": (advance, "store_result"),
    }
    owner, name = calls[fatal]
    real = getattr(owner, name)
    alive = [True]

    def killed(*args: Any, **more: Any) -> Any:
        result = real(*args, **more)
        if alive:
            alive.clear()
            raise Killed
        return result

    monkeypatch.setattr(owner, name, killed)
    harness.plan()
    harness.checkpoint(5)
    for _ in range(4):
        try:
            harness.tick()
        except Killed:
            harness.clock.pass_s(advance.CLAIM.total_seconds() + 1)
        if harness.executor.jobs and not harness.store.list(keys.EVALUATIONS):
            harness.write(5, 2.5)
            harness.end()
    harness.tick()
    assert not alive
    assert harness.executor.launches == 1
    assert harness.states() == {5: "succeeded"}
    assert harness.points() == [(5, 2.5)]
    assert harness.messages() == ["val added", "val of round 5: loss 2.5"]
    assert EvaluationAttempt.objects.get().ended_at is not None


def test_a_failed_job_is_repeated_until_the_limit(harness: Evaluations) -> None:
    harness.plan(max_attempts=2)
    harness.checkpoint(5)
    for number in (1, 2):
        harness.tick()
        harness.tick()
        assert harness.executor.launches == number
        harness.end(Cause.OUT_OF_MEMORY, code=-9)
        harness.tick()
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.failures) == ("failed", 2)
    assert row.message == "the job wrote no result (out_of_memory, exit status -9)"
    assert evaluations.evaluate(harness.run, "val", actor=harness.run.owner, round=5)
    harness.tick()
    harness.write(5, 2.0)
    harness.end()
    harness.tick()
    assert harness.states() == {5: "succeeded"}


def test_a_permanent_error_is_not_repeated_and_its_reason_is_shown(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executors.base import LogLine

    lines = ["INFO reading", "error: data: expected token shards at s3://b/v, found none"]
    monkeypatch.setattr(
        harness.executor, "logs",
        lambda handle, **more: iter(LogLine(text=text, position="1") for text in lines),
    )  # fmt: skip
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    harness.end(Cause.ERROR, code=EX_CONFIG)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert row.state == "failed"
    assert row.message == "data: expected token shards at s3://b/v, found none"
    assert "INFO reading" in row.attempts.get().log


def test_cancel_ends_the_job_first(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    assert evaluations.cancel(harness.run, "val", 5, actor=harness.run.owner)
    harness.tick()
    assert harness.executor.cancelled == [harness.key()]
    assert harness.states() == {5: "cancelling"}
    harness.end(Cause.CANCELLED)
    harness.tick()
    assert harness.states() == {5: "cancelled"}


def test_an_evaluation_that_is_cancelled_while_it_begins_has_no_job(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = jobs.begin_attempt

    def begin(row: Evaluation) -> EvaluationAttempt | None:
        assert evaluations.cancel(harness.run, "val", 5, actor=harness.run.owner)
        return real(row)

    monkeypatch.setattr(jobs, "begin_attempt", begin)
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    harness.tick()
    assert harness.states() == {5: "cancelled"}
    assert harness.executor.launches == 0


def test_two_workers_begin_one_evaluation_of_a_run(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker makes its step while the first has claimed, but not begun its own."""
    real = jobs.begin_attempt
    others = [10]

    def begin(row: Evaluation) -> EvaluationAttempt | None:
        if others:
            advance.advance(Evaluation.objects.get(round=others.pop()).pk)
        return real(row)

    monkeypatch.setattr(jobs, "begin_attempt", begin)
    harness.plan()
    harness.checkpoint(5)
    harness.checkpoint(10)
    schedule.call_for_due()
    advance.advance(Evaluation.objects.get(round=5).pk)
    assert sorted(harness.states().values()) == ["queued", "running"]
    assert harness.executor.launches == 1


def test_an_unavailable_backend_is_asked_again(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.executor.away = "no capacity in the region"
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("running", "no capacity in the region")
    harness.executor.away = ""
    harness.clock.pass_s(10)
    harness.tick()
    assert harness.executor.launches == 1


def test_a_backend_that_stays_unavailable_does_not_hold_the_others(harness: Evaluations) -> None:
    harness.plan(every=0)
    harness.checkpoint(5)
    harness.executor.away = "no capacity in the region"
    evaluations.evaluate(harness.run, "val", actor=harness.run.owner)
    harness.tick()
    assert harness.states() == {5: "running"}
    harness.clock.pass_s(advance.GIVE_UP.total_seconds() + 1)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("failed", "no capacity in the region")
    # A repetition is tried as long as the first time.
    evaluations.evaluate(harness.run, "val", actor=harness.run.owner)
    harness.tick()
    assert harness.states() == {5: "running"}
    harness.executor.away = ""
    harness.clock.pass_s(60)
    harness.tick()
    assert harness.executor.launches == 1


def test_the_time_in_the_queue_does_not_count_as_unavailable(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    harness.checkpoint(10)
    harness.tick()
    assert harness.states() == {5: "running", 10: "queued"}
    harness.clock.pass_s(advance.GIVE_UP.total_seconds() + 1)
    read = advance.read_result

    def away(row: Evaluation, store: Store) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(advance, "read_result", away)
    harness.tick()
    assert harness.states() == {5: "running", 10: "queued"}
    # An answer in between begins the time again.
    harness.clock.pass_s(advance.GIVE_UP.total_seconds() - 60)
    monkeypatch.setattr(advance, "read_result", read)
    harness.tick()
    monkeypatch.setattr(advance, "read_result", away)
    harness.clock.pass_s(300)
    harness.tick()
    assert harness.states() == {5: "running", 10: "queued"}
    harness.clock.pass_s(advance.GIVE_UP.total_seconds() + 1)
    harness.tick()
    assert harness.states() == {5: "running", 10: "failed"}


def test_a_repeated_evaluation_waits_for_the_bucket(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.plan(every=0)
    harness.checkpoint(5, weights=False)
    evaluations.evaluate(harness.run, "val", actor=harness.run.owner)
    harness.tick()
    assert harness.states() == {5: "skipped"}
    harness.clock.pass_s(advance.GIVE_UP.total_seconds() + 1)

    def away(row: Evaluation, store: Store) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(advance, "read_result", away)
    evaluations.evaluate(harness.run, "val", actor=harness.run.owner)
    harness.tick()
    assert harness.states() == {5: "queued"}


def test_a_job_goes_on_while_its_account_needs_an_operator(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    poll = harness.executor.poll

    def denied(handles: Any) -> Any:
        raise AccountError("the token has expired")

    monkeypatch.setattr(harness.executor, "poll", denied)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("running", "the token has expired")
    assert row.attempts.get().ended_at is None
    monkeypatch.setattr(harness.executor, "poll", poll)
    harness.write(5, 2.0)
    harness.end()
    harness.clock.pass_s(60)
    harness.tick()
    assert harness.states() == {5: "succeeded"}


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_account_that_stays_away_does_not_hold_the_others(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    if cancelled:
        evaluations.cancel(harness.run, "val", 5, actor=harness.run.owner)

    def denied(handles: Any) -> Any:
        raise AccountError("the token has expired")

    monkeypatch.setattr(harness.executor, "poll", denied)
    harness.tick()
    harness.clock.pass_s(advance.GIVE_UP.total_seconds() + 60)
    harness.tick()
    assert harness.states() == {5: "cancelling" if cancelled else "running"}
    harness.clock.pass_s(3600)
    harness.tick()
    assert harness.states() == {5: "failed"}


def test_a_refused_launch_fails_with_the_reason(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.executor.refuses = LaunchRefused("no such machine")
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("failed", "no such machine")
    assert row.attempts.get().ended_at is not None


def test_the_reaper_spares_jobs_of_evaluations(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    handles = harness.executor.live()
    assert orphans(handles, duplicates=True) == []
    EvaluationAttempt.objects.update(ended_at=timezone.now())
    assert [job.why for job in orphans(handles, duplicates=True)] == ["its attempt has ended"]


def test_deletion_of_a_run_waits_for_the_jobs(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    Run.objects.filter(pk=harness.run.pk).update(
        state=RunState.SUCCEEDED, delete_requested_at=timezone.now()
    )
    with pytest.raises(LaunchLater, match="evaluations of the run are being cancelled"):
        deletion.delete_run(str(harness.run.pk))
    harness.tick()
    harness.end(Cause.CANCELLED)
    harness.tick()
    deletion.delete_run(str(harness.run.pk))
    assert not Run.objects.filter(pk=harness.run.pk).exists()


def test_an_unexpected_error_is_shown_and_given_up_in_the_end(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()

    def broken(handles: Any) -> Any:
        raise KeyError("a bug of the backend")

    monkeypatch.setattr(harness.executor, "poll", broken)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message) == ("running", "KeyError: 'a bug of the backend'")
    for _ in range(2):
        harness.clock.pass_s(advance.GIVE_UP.total_seconds())
        harness.tick()
    assert harness.states() == {5: "failed"}


@pytest.mark.parametrize("wall_s", [math.nan, math.inf, 1e20, -1.0])
def test_times_that_no_job_can_have_are_ignored(harness: Evaluations, wall_s: float) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    running = ReplicaStatus(state=JobState.RUNNING, started_wall_s=wall_s)
    harness.executor.jobs[harness.key()] = running
    harness.tick()
    harness.write(5, 2.0)
    harness.executor.jobs[harness.key()] = dataclasses.replace(
        running, state=JobState.ENDED, cause=Cause.DONE, exit_code=0, ended_wall_s=wall_s
    )
    harness.tick()
    assert harness.states() == {5: "succeeded"}
    attempt = EvaluationAttempt.objects.get()
    assert attempt.started_at is not None
    assert attempt.ended_at is not None
    assert attempt.started_at <= attempt.ended_at <= harness.clock()


def pending(harness: Evaluations, cause: PendingCause) -> None:
    harness.executor.jobs[harness.key()] = ReplicaStatus(
        state=JobState.PENDING, pending=cause, message="Back-off pulling image"
    )


def test_a_job_that_does_not_start_does_not_hold_the_others(harness: Evaluations) -> None:
    harness.plan(max_attempts=1)
    harness.checkpoint(5)
    harness.checkpoint(10)
    harness.tick()
    pending(harness, PendingCause.IMAGE)
    harness.tick()
    row = Evaluation.objects.get(round=5)
    assert (row.state, row.message) == ("running", "image: Back-off pulling image")
    harness.clock.pass_s(290)
    harness.tick()
    assert harness.executor.cancelled == []
    harness.clock.pass_s(20)
    harness.tick()
    assert harness.executor.cancelled == [harness.key()]
    harness.end(Cause.CANCELLED)
    harness.tick()
    row.refresh_from_db()
    assert row.state == "failed"
    assert row.message == "not started after 316 s (image): Back-off pulling image"
    harness.tick()
    assert harness.states() == {5: "failed", 10: "running"}


def test_a_job_in_the_queue_of_a_cluster_waits(harness: Evaluations) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    pending(harness, PendingCause.QUEUED)
    for _ in range(3):
        harness.clock.pass_s(advance.GIVE_UP.total_seconds())
        harness.tick()
    pending(harness, PendingCause.STARTING)
    harness.tick()
    assert harness.executor.cancelled == []
    harness.executor.jobs[harness.key()] = ReplicaStatus(state=JobState.RUNNING)
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert (row.state, row.message, row.retrying_since) == ("running", "", None)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_whose_state_stays_unknown_does_not_hold_the_others(
    harness: Evaluations, cancelled: bool
) -> None:
    harness.plan()
    harness.checkpoint(5)
    harness.tick()
    if cancelled:
        evaluations.cancel(harness.run, "val", 5, actor=harness.run.owner)
    harness.executor.jobs[harness.key()] = ReplicaStatus(
        state=JobState.UNKNOWN, message="the node is gone"
    )
    harness.tick()
    row = Evaluation.objects.get(run=harness.run)
    assert row.state == ("cancelling" if cancelled else "running")
    assert row.message == "the node is gone"
    for _ in range(2):
        harness.clock.pass_s(advance.GIVE_UP.total_seconds())
        harness.tick()
    assert harness.states() == {5: "failed"}


def test_a_plan_is_not_removed_while_an_evaluation_begins(
    harness: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would run, and its cost would be lost."""
    harness.plan()
    harness.checkpoint(5)
    schedule.call_for_due()
    locked = Run.objects.select_for_update

    def begins() -> Any:
        monkeypatch.setattr(Run.objects, "select_for_update", locked)
        advance.advance(Evaluation.objects.get(round=5).pk)  # held the lock before
        return locked()

    monkeypatch.setattr(Run.objects, "select_for_update", begins)
    with pytest.raises(ActionRefused, match="cancel the running evaluation of val first"):
        evaluations.remove_plan(harness.run, "val", actor=harness.run.owner)
    assert harness.executor.launches == 1
    assert plan_named(harness.run, "val") is not None


def test_an_evaluation_that_was_queued_during_the_removal_of_its_plan_has_no_job(
    harness: Evaluations,
) -> None:
    plan = harness.plan()
    harness.checkpoint(5)
    harness.tick()
    harness.write(5, 2.0)
    harness.end()
    harness.tick()
    evaluations.remove_plan(harness.run, "val", actor=harness.run.owner)
    harness.checkpoint(10)
    schedule.queue_new(plan, timezone.now())  # read before it was removed
    harness.tick()
    assert harness.states() == {5: "succeeded", 10: "cancelled"}
    assert harness.executor.launches == 1
