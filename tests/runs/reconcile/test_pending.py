"""Attempts that have not started: the displayed reason, the limit of each cause, the next step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from executors.base import Cause, JobState, NoCapacity, PendingCause, ReplicaStatus, RetryLater
from runs.exceptions import LaunchLater
from runs.models import Replica, ReplicaAttempt
from runs.reconcile import retry_policy
from runs.reconcile.launch import launch_replica
from runs.reconcile.retry_policy import NextStep
from runs.states import ReplicaState
from tests.runs import run_harness as w
from tests.runs.launching import MakeRun, launched

pytestmark = pytest.mark.django_db


def pending(cause: PendingCause | None, message: str = "", phase: str = "Pending") -> ReplicaStatus:
    return ReplicaStatus(state=JobState.PENDING, pending=cause, message=message, phase=phase)


@pytest.fixture(scope="module")
def waiting(share_harness: Callable[..., Any]) -> Any:
    """A run whose replica 0 was launched and has not started."""
    return share_harness(lambda harness: None, replicas=1)


@pytest.fixture
def harness(waiting: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(waiting)


def wait(harness: Any, status: ReplicaStatus) -> Replica:
    harness.executor.jobs[harness.key(0)] = status
    harness.tick(1)
    result: Replica = harness.replica(0)
    return result


@pytest.mark.parametrize("cause", PendingCause)
def test_every_cause_has_a_limit_and_a_next_step(cause: PendingCause) -> None:
    limit_s = retry_policy.pending_limit_s(cause, timeout_s=3600)
    if cause is PendingCause.QUEUED:
        assert limit_s is None
    else:
        assert limit_s is not None and 60 <= limit_s <= 3600
    operator = {PendingCause.IMAGE, PendingCause.INCOMPLETE, PendingCause.REFUSED}
    assert (retry_policy.after_pending(cause) is NextStep.INTERVENTION) is (cause in operator)


def test_without_a_timeout_only_causes_that_an_operator_removes_have_a_limit() -> None:
    assert retry_policy.pending_limit_s(PendingCause.CAPACITY, timeout_s=0) is None
    assert retry_policy.pending_limit_s(PendingCause.IMAGE, timeout_s=0) == 300


def test_the_backends_explanation_is_the_replicas_reason(harness: Any) -> None:
    replica = wait(
        harness, pending(PendingCause.IMAGE, "Back-off pulling image x:1", "ImagePullBackOff")
    )
    assert replica.state == ReplicaState.PROVISIONING
    assert replica.state_reason == "ImagePullBackOff: Back-off pulling image x:1"
    assert replica.backend_state == "ImagePullBackOff"
    assert replica.pending_cause == PendingCause.IMAGE and replica.pending_since is not None


def test_an_image_that_cannot_be_pulled_ends_the_attempt_and_blocks_the_pool(harness: Any) -> None:
    wait(harness, pending(PendingCause.IMAGE, "x:1: not found", "ImagePullBackOff"))
    harness.tick(290)
    assert harness.replica(0).state == ReplicaState.PROVISIONING
    harness.tick(20)
    replica = harness.replica(0)
    assert replica.state == ReplicaState.RESTARTING and replica.restarts == 0
    assert "not started after" in replica.state_reason and "x:1: not found" in replica.state_reason
    assert replica.pool.requires_intervention and "x:1: not found" in replica.pool.last_error
    assert harness.executor.cancelled == [harness.key(0)]
    harness.executor.end(harness.key(0), Cause.CANCELLED)
    harness.tick(1)
    attempt = ReplicaAttempt.objects.get(replica=replica)
    assert attempt.cause == retry_policy.NOT_STARTED and "x:1: not found" in attempt.message
    launch_replica(replica.pk)
    assert harness.executor.launches == 1, "nothing is launched until an operator acts"


def test_a_job_that_no_machine_takes_waits_longer_and_is_launched_again(harness: Any) -> None:
    wait(harness, pending(PendingCause.CAPACITY, "0/3 nodes are available", "Unschedulable"))
    harness.tick(3000)
    assert harness.replica(0).state == ReplicaState.PROVISIONING
    harness.tick(700)
    replica = harness.replica(0)
    assert replica.state == ReplicaState.RESTARTING and replica.restarts == 0
    assert not replica.pool.requires_intervention and replica.pool.failures == 1
    harness.executor.end(harness.key(0), Cause.CANCELLED)
    harness.tick(1)
    harness.tick(60)
    launch_replica(replica.pk)
    assert harness.executor.launches == 2


def test_a_suspended_job_waits_without_limit_and_is_never_hung(harness: Any) -> None:
    suspended = pending(PendingCause.QUEUED, "queue research has not admitted it", "Suspended")
    wait(harness, suspended)
    for state in (ReplicaState.PROVISIONING, ReplicaState.SUSPECT):
        Replica.objects.update(state=state, worked_since=harness.clock())
        for _ in range(3):
            harness.tick(24 * 3600)
        replica = harness.replica(0)
        assert (replica.state, replica.restarts) == (state, 0)
    assert harness.executor.cancelled == []


def test_each_cause_has_a_separate_limit(harness: Any) -> None:
    wait(harness, pending(PendingCause.IMAGE, "registry is down"))
    harness.tick(200)
    wait(harness, pending(PendingCause.STARTING, "pulling"))
    harness.tick(200)
    assert harness.replica(0).state == ReplicaState.PROVISIONING


@pytest.mark.slow
def test_causes_that_alternate_wait_for_a_limited_time(harness: Any) -> None:
    causes = itertools.cycle((PendingCause.IMAGE, PendingCause.STARTING, PendingCause.INCOMPLETE))
    for _ in range(19):
        assert wait(harness, pending(next(causes), "again")).state == ReplicaState.PROVISIONING
        harness.tick(200)
    wait(harness, pending(next(causes), "again"))
    harness.tick(100)
    replica = harness.replica(0)
    assert replica.state == ReplicaState.RESTARTING
    assert "not started after 39" in replica.state_reason


def test_the_time_in_a_queue_does_not_count(harness: Any) -> None:
    for _ in range(3):
        wait(harness, pending(PendingCause.QUEUED, "not admitted"))
        harness.tick(7000)
        wait(harness, pending(PendingCause.STARTING, "pulling"))
        harness.tick(3000)
    assert harness.replica(0).state == ReplicaState.PROVISIONING


def test_a_started_job_is_no_longer_pending(harness: Any) -> None:
    wait(harness, pending(PendingCause.CAPACITY, "no room"))
    replica = wait(harness, ReplicaStatus(state=JobState.RUNNING))
    assert (replica.pending_cause, replica.pending_since) == ("", None)


# Incomplete attempts.


def test_an_incomplete_job_that_a_poll_finds_is_completed(
    make_run: MakeRun, executor: w.FakeExecutor
) -> None:
    """The launch died after its first request; a poll finds the job before the next launch."""
    run = launched(make_run(replicas=1))
    replica = run.replicas.get()
    launch_replica(replica.pk)
    attempt = replica.attempts.get()
    ReplicaAttempt.objects.filter(pk=attempt.pk).update(launched_at=None)  # handle: by a poll
    launch_replica(replica.pk)
    attempt.refresh_from_db()
    assert executor.ensured == 2 and executor.launches == 1
    assert attempt.is_complete
    launch_replica(replica.pk)
    assert executor.ensured == 2, "complete: nothing left to do"


def test_an_incomplete_job_is_launched_again_by_the_tick(harness: Any) -> None:
    replica = wait(harness, pending(PendingCause.INCOMPLETE, "secret not found", "CreateError"))
    assert harness.outbox == []
    for _ in range(2):
        harness.tick(15)
    assert ("launch_pool", replica.pool_id) in harness.outbox
    launch_replica(replica.pk)
    assert harness.executor.ensured == 2 and harness.executor.launches == 1


def test_an_incomplete_job_is_not_given_up_for_one_failed_request(
    harness: Any,
) -> None:
    replica = wait(harness, pending(PendingCause.INCOMPLETE, "secret not found"))
    ReplicaAttempt.objects.update(launched_at=None)
    harness.clock.pass_s(3600)
    harness.executor.refuses = RetryLater("503")
    with pytest.raises(LaunchLater):
        launch_replica(replica.pk)
    assert replica.attempts.get().ended_at is None


def test_a_full_quota_is_waited_for_and_shown(
    make_run: MakeRun, executor: w.FakeExecutor, clock: Any
) -> None:
    run = launched(make_run(replicas=1))
    replica = run.replicas.get()
    executor.refuses = NoCapacity("exceeded quota: gpus, used 8 of 8")
    for _ in range(6):
        with pytest.raises(LaunchLater):
            launch_replica(replica.pk)
        launch_replica(replica.pk)  # the pool waits for a minute, and no longer each time
        clock.pass_s(61)
    clock.pass_s(3600)
    replica.refresh_from_db()
    assert replica.pool.failures == 0 and "exceeded quota" in replica.pool.last_error
    assert len(run.events.filter(kind="breaker")) == 1
    assert replica.state == ReplicaState.PROVISIONING
    assert replica.state_reason == "exceeded quota: gpus, used 8 of 8"
    assert replica.pending_cause == PendingCause.QUOTA
    executor.refuses = ""
    launch_replica(replica.pk)
    assert executor.launches == 1
