"""Draining replicas: through the bucket, then by force; before deadlines; when they hang."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import Command
from executors.base import Cause, JobState, ReplicaStatus
from runs.actions import replicas_and_pools
from runs.models import ReplicaAttempt
from runs.reconcile import retry_policy
from tests.matrix import matrix

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def commands(harness: Any) -> list[Command]:
    store = harness.bucket.store
    result = [i.key for i in store.list(keys.CONTROL) if not i.key.startswith(keys.JOURNAL)]
    return [Command.from_bytes(store.get(key)) for key in result]


def ticks(harness: Any, *after_s: float) -> None:
    for seconds in after_s:
        harness.beat_all()
        harness.tick(seconds)


def test_a_stopped_replica_is_drained_once_and_ended_after_the_drain_time(harness: Any) -> None:
    replicas_and_pools.stop_replica(harness.replica(1), actor=harness.run.owner)
    ticks(harness, 1, 1, 1)
    [command] = commands(harness)
    assert (command.command, command.replica) == ("drain", 1)
    assert command.arguments["incarnation"] == harness.replica(1).incarnation
    assert command.arguments["within_s"] == retry_policy.DRAIN_FLOOR_S - 1
    assert harness.executor.cancelled == []
    ticks(harness, retry_policy.DRAIN_FLOOR_S - 4)
    assert harness.executor.cancelled == []
    ticks(harness, 2)
    assert set(harness.executor.cancelled) == {harness.key(1)}


def test_force_sends_no_drain(harness: Any) -> None:
    replicas_and_pools.stop_replica(harness.replica(1), actor=harness.run.owner)
    assert replicas_and_pools.stop_replica(harness.replica(1), actor=harness.run.owner, force=True)
    ticks(harness, 1)
    assert harness.executor.cancelled == [harness.key(1)]
    assert commands(harness) == []


def test_a_replica_that_never_worked_is_not_drained(make_harness: Callable[..., Any]) -> None:
    harness = make_harness(replicas=2)
    replicas_and_pools.restart_replica(harness.replica(0), actor=harness.run.owner)
    harness.tick()
    assert harness.executor.cancelled == [harness.key(0)]
    assert commands(harness) == []


def test_each_draining_replica_gets_one_command(harness: Any) -> None:
    for number in (0, 1):
        replicas_and_pools.restart_replica(harness.replica(number), actor=harness.run.owner)
    ticks(harness, 1)
    assert [(c.n, c.replica) for c in commands(harness)] == [(1, 0), (2, 1)]
    harness.executor.end(harness.key(0), Cause.ERROR, code=143)
    ticks(harness, 1)
    harness.work()
    assert harness.replica(0).attempts.count() == 2
    harness.bucket.beat(0, 1, "computing", seq=2)
    harness.tick()
    assert harness.replica(0).state == "computing"
    assert len(commands(harness)) == 2
    assert harness.replica(0).drain_sent_at is None


def deadline(harness: Any, number: int, in_s: float) -> None:
    at = harness.clock().timestamp() + in_s
    harness.executor.jobs[harness.key(number)] = ReplicaStatus(
        state=JobState.RUNNING, started_wall_s=at - 3600, deadline_wall_s=at
    )


def test_a_replica_is_replaced_before_its_deadline(harness: Any) -> None:
    deadline(harness, 1, 3600)
    ticks(harness, 1)
    assert harness.replica(1).state == "computing"
    attempt = harness.replica(1).attempts.get()
    assert attempt.deadline_at - harness.clock() == datetime.timedelta(seconds=3599)
    ticks(harness, 3600 - retry_policy.REPLACE_FLOOR_S)
    replica = harness.replica(1)
    assert replica.state == "restarting"
    assert "handed over: local ends the job in" in replica.state_reason
    ticks(harness, 1)
    [command] = commands(harness)
    assert (command.command, command.replica) == ("drain", 1)
    harness.executor.end(harness.key(1), Cause.ERROR, code=143)
    ticks(harness, 1)
    harness.work()
    assert harness.replica(1).attempts.count() == 2
    assert harness.replica(1).restarts == 0
    assert harness.replica(0).attempts.count() == 1


def test_expiring_credentials_are_a_deadline_too(harness: Any) -> None:
    ReplicaAttempt.objects.filter(replica=harness.replica(0)).update(
        expires_at=harness.clock() + datetime.timedelta(seconds=3600)
    )
    ticks(harness, 3500)
    assert harness.replica(0).state == "computing"
    ticks(harness, 60)
    assert "the job's credentials expire" in harness.replica(0).state_reason


def test_a_hung_job_is_ended_and_relaunched(harness: Any) -> None:
    harness.tick(60)
    assert harness.replica(1).state == "suspect"
    harness.tick(retry_policy.HUNG_AFTER_S - 1)
    assert harness.replica(1).state == "suspect"
    harness.tick(2)
    replica = harness.replica(1)
    assert (replica.state, replica.restarts) == ("restarting", 1)
    assert "hung: expected a heartbeat" in replica.state_reason
    assert harness.key(1) in harness.executor.cancelled


@pytest.mark.slow
def test_a_preempted_replica_is_relaunched_without_limit(harness: Any) -> None:
    for attempt in range(1, 7):
        harness.executor.end(harness.key(1, attempt), Cause.PREEMPTED)
        harness.beat_all(but=(1,))
        harness.tick()
        assert harness.replica(1).state == "restarting"
        harness.beat_all(but=(1,))
        harness.tick(retry_policy.BACKOFF_CAP_S)
        harness.work()
        harness.bucket.beat(1, 1, "computing", seq=attempt + 1)
        harness.tick()
    assert (harness.replica(1).restarts, harness.replica(1).state) == (0, "computing")


@matrix(("worked_s", "state"), [(590, "failed"), (610, "restarting")], fast=[(610, "restarting")])
def test_a_failure_after_long_work_resets_the_count(
    harness: Any, worked_s: int, state: str
) -> None:
    harness.run.replicas.filter(number=1).update(restarts=harness.run.max_restarts)
    ticks(harness, *[30] * (worked_s // 30), worked_s % 30)
    harness.executor.end(harness.key(1), Cause.ERROR, code=1)
    ticks(harness, 1)
    assert harness.replica(1).state == state
    assert harness.replica(1).restarts == (1 if state == "restarting" else 3)
