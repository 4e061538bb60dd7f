"""Replicas that leave: asked through the bucket, then ended; before deadlines; when they hang."""

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

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    made = make_world(replicas=2)
    made.start()
    return made


def commands(world: Any) -> list[Command]:
    store = world.bucket.store
    found = [i.key for i in store.list(keys.CONTROL) if not i.key.startswith(keys.JOURNAL)]
    return [Command.from_bytes(store.get(key)) for key in found]


def ticks(world: Any, *after_s: float) -> None:
    for seconds in after_s:
        world.beat_all()
        world.tick(seconds)


def test_a_replica_that_is_stopped_is_asked_once_and_ended_when_its_time_is_up(world: Any) -> None:
    replicas_and_pools.stop_replica(world.replica(1), actor=world.run.owner)
    ticks(world, 1, 1, 1)
    [command] = commands(world)
    assert (command.command, command.replica) == ("drain", 1)
    assert command.arguments["incarnation"] == world.replica(1).incarnation
    assert command.arguments["within_s"] == retry_policy.DRAIN_FLOOR_S - 1
    assert world.executor.cancelled == []
    ticks(world, retry_policy.DRAIN_FLOOR_S - 4)
    assert world.executor.cancelled == []
    ticks(world, 2)
    assert set(world.executor.cancelled) == {world.key(1)}


def test_force_does_not_ask(world: Any) -> None:
    replicas_and_pools.stop_replica(world.replica(1), actor=world.run.owner)
    assert replicas_and_pools.stop_replica(world.replica(1), actor=world.run.owner, force=True)
    ticks(world, 1)
    assert world.executor.cancelled == [world.key(1)]
    assert commands(world) == []


def test_who_never_began_to_work_is_not_asked(make_world: Callable[..., Any]) -> None:
    world = make_world(replicas=2)
    replicas_and_pools.restart_replica(world.replica(0), actor=world.run.owner)
    world.tick()
    assert world.executor.cancelled == [world.key(0)]
    assert commands(world) == []


def test_two_that_leave_get_a_command_each_and_a_relaunch_is_not_asked_again(world: Any) -> None:
    for number in (0, 1):
        replicas_and_pools.restart_replica(world.replica(number), actor=world.run.owner)
    ticks(world, 1)
    assert [(c.n, c.replica) for c in commands(world)] == [(1, 0), (2, 1)]
    world.executor.end(world.key(0), Cause.ERROR, code=143)
    ticks(world, 1)
    world.work()
    assert world.replica(0).attempts.count() == 2
    world.bucket.beat(0, 1, "computing", seq=2)
    world.tick()
    assert world.replica(0).state == "computing"
    assert len(commands(world)) == 2
    assert world.replica(0).drain_sent_at is None


def deadline(world: Any, number: int, in_s: float) -> None:
    at = world.clock().timestamp() + in_s
    world.executor.jobs[world.key(number)] = ReplicaStatus(
        state=JobState.RUNNING, started_wall_s=at - 3600, deadline_wall_s=at
    )


def test_before_its_deadline_a_replica_is_handed_over(world: Any) -> None:
    deadline(world, 1, 3600)
    ticks(world, 1)
    assert world.replica(1).state == "computing"
    attempt = world.replica(1).attempts.get()
    assert attempt.deadline_at - world.clock() == datetime.timedelta(seconds=3599)
    ticks(world, 3600 - retry_policy.HAND_OVER_FLOOR_S)
    replica = world.replica(1)
    assert replica.state == "restarting"
    assert "handed over: local ends the job in" in replica.state_reason
    ticks(world, 1)
    [command] = commands(world)
    assert (command.command, command.replica) == ("drain", 1)
    world.executor.end(world.key(1), Cause.ERROR, code=143)
    ticks(world, 1)
    world.work()
    assert world.replica(1).attempts.count() == 2
    assert world.replica(1).restarts == 0
    assert world.replica(0).attempts.count() == 1


def test_credentials_that_end_are_a_deadline_too(world: Any) -> None:
    ReplicaAttempt.objects.filter(replica=world.replica(0)).update(
        expires_at=world.clock() + datetime.timedelta(seconds=3600)
    )
    ticks(world, 3500)
    assert world.replica(0).state == "computing"
    ticks(world, 60)
    assert "the job's credentials end" in world.replica(0).state_reason


def test_a_job_that_hangs_is_ended_and_started_again(world: Any) -> None:
    world.tick(60)
    assert world.replica(1).state == "suspect"
    world.tick(retry_policy.HUNG_AFTER_S - 1)
    assert world.replica(1).state == "suspect"
    world.tick(2)
    replica = world.replica(1)
    assert (replica.state, replica.restarts) == ("restarting", 1)
    assert "hung: expected a beat" in replica.state_reason
    assert world.key(1) in world.executor.cancelled


def test_a_preempted_replica_comes_back_as_often_as_it_takes(world: Any) -> None:
    for attempt in range(1, 7):
        world.executor.end(world.key(1, attempt), Cause.PREEMPTED)
        world.beat_all(but=(1,))
        world.tick()
        assert world.replica(1).state == "restarting"
        world.beat_all(but=(1,))
        world.tick(retry_policy.BACKOFF_CAP_S)
        world.work()
        world.bucket.beat(1, 1, "computing", seq=attempt + 1)
        world.tick()
    assert (world.replica(1).restarts, world.replica(1).state) == (0, "computing")


@pytest.mark.parametrize(("worked", "state"), [(59, "failed"), (61, "restarting")])
def test_a_failure_after_long_work_is_the_first_again(world: Any, worked: int, state: str) -> None:
    world.run.replicas.filter(number=1).update(restarts=world.run.max_restarts)
    ticks(world, *[10] * worked)
    world.executor.end(world.key(1), Cause.ERROR, code=1)
    ticks(world, 1)
    assert world.replica(1).state == state
    assert world.replica(1).restarts == (1 if state == "restarting" else 3)
