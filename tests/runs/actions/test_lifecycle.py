"""Pausing a run and sending it on, resuming what ended, saving, ending by force."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import Command
from executors.base import Cause
from runs.actions import lifecycle, replicas_and_pools
from runs.exceptions import CannotDo, IllegalTransition
from runs.models import ReplicaAttempt, Run
from runs.queries.selectors import runs_to_look_after
from runs.reconcile import retry_policy

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    made = make_world(replicas=2)
    made.bucket.segment(0, 1, losses=(3.0,))
    made.start()
    return made


def commands(world: Any) -> list[Command]:
    store = world.bucket.store
    found = [i.key for i in store.list(keys.CONTROL) if not i.key.startswith(keys.JOURNAL)]
    return [Command.from_bytes(store.get(key)) for key in found]


def pause(world: Any) -> None:
    assert lifecycle.pause(world.run, actor=world.run.owner)
    world.tick()


def all_leave(world: Any, seq: int = 1) -> None:
    """Every job ends as that of a replica that was asked to leave."""
    for attempt in ReplicaAttempt.objects.filter(replica__run=world.run, ended_at=None):
        world.bucket.beat(attempt.replica.number, 99, "left", seq=seq)
        world.executor.end(attempt.launch_key, Cause.DONE, code=0)
    world.tick()


def launch(world: Any) -> None:
    """What a worker does with a run that was sent on."""
    from runs.reconcile.launch import launch_run

    launch_run(str(world.run.pk))
    world.run.refresh_from_db()
    world.work()


def states(world: Any) -> list[str]:
    return [r.state for r in world.run.replicas.order_by("number")]


# A pause.


def test_a_pause_asks_everybody_to_leave_and_releases_the_machines(world: Any) -> None:
    pause(world)
    assert world.run.state == "pausing"
    assert states(world) == ["restarting", "restarting"]
    assert [(c.command, c.replica) for c in commands(world)] == [("drain", 0), ("drain", 1)]
    assert commands(world)[0].arguments["within_s"] == retry_policy.DRAIN_FLOOR_S
    assert world.executor.cancelled == []
    all_leave(world)
    assert (world.run.state, world.run.state_reason) == ("paused", "all machines are released")
    assert world.outbox == [("reconcile_run", str(world.run.pk))]
    assert not ReplicaAttempt.objects.filter(ended_at=None).exists()


def test_who_does_not_leave_in_time_is_ended_so_nothing_is_billed(world: Any) -> None:
    pause(world)
    world.tick(retry_policy.DRAIN_FLOOR_S + 1)
    assert set(world.executor.cancelled) == {world.key(0), world.key(1)}
    assert world.run.state == "pausing"


def test_a_paused_run_launches_nothing_and_is_left_alone(world: Any) -> None:
    pause(world)
    all_leave(world)
    world.outbox.clear()
    world.tick(3600)
    assert world.outbox == []
    assert world.run.state == "paused"
    assert world.run not in runs_to_look_after()


def test_a_paused_run_goes_on_with_the_same_replicas(world: Any) -> None:
    pause(world)
    all_leave(world)
    world.clock.pass_s(3600)
    assert lifecycle.unpause(world.run, actor=world.run.owner)
    launch(world)
    assert world.run.state == "provisioning"
    assert [r.attempts.count() for r in world.run.replicas.all()] == [2, 2]
    world.tick()
    assert world.run.state == "provisioning"  # not stalled: it is on its way
    world.bucket.beat(0, 1, "computing", seq=2)
    world.tick()
    assert world.run.state == "degraded"
    world.bucket.beat(1, 1, "computing", seq=2)
    world.bucket.beat(0, 2, "computing", seq=2)
    world.tick()
    assert world.run.state == "running"
    assert world.replica(0).restarts == 0


def test_the_time_of_a_pause_counts_towards_no_limit(make_world: Callable[..., Any]) -> None:
    world = make_world(replicas=2, time_limit_s=600)
    world.start()
    pause(world)
    all_leave(world)
    world.clock.pass_s(7200)
    lifecycle.unpause(world.run, actor=world.run.owner)
    launch(world)
    for count in (1, 2):
        world.bucket.beat(0, count, "computing", seq=2)
        world.bucket.beat(1, count, "computing", seq=2)
        world.tick()
    assert world.run.state == "running"
    assert world.run.idle_s == pytest.approx(7200, abs=5)
    world.bucket.beat(0, 3, "computing", seq=2)
    world.tick(700)
    assert world.run.state == "stopping"


def test_a_long_pause_is_no_stall(world: Any) -> None:
    for round in (1, 2):
        world.bucket.commit(round, (0, 1))
    world.beat_all()
    world.tick()
    assert world.run.round_s is not None
    pause(world)
    all_leave(world)
    world.clock.pass_s(7200)
    lifecycle.unpause(world.run, actor=world.run.owner)
    launch(world)
    for number in (0, 1):
        world.bucket.beat(number, 1, "computing", seq=2)
    world.tick()
    assert world.run.state == "running"


def test_a_paused_run_can_be_stopped(world: Any) -> None:
    pause(world)
    all_leave(world)
    assert replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    assert world.run.state == "cancelled"
    world.tick()
    assert states(world) == ["evicted", "evicted"]


def test_a_launch_that_comes_through_during_a_pause_is_ended(
    make_world: Callable[..., Any],
) -> None:
    world = make_world(replicas=1)
    world.run.refresh_from_db()
    ReplicaAttempt.objects.update(handle=None)
    assert lifecycle.pause(world.run, actor=world.run.owner)
    world.tick()
    assert world.run.state == "pausing"
    assert world.executor.cancelled == [world.key(0)]


@pytest.mark.parametrize("state", ["queued", "stopping", "succeeded", "failed", "cancelled"])
def test_what_is_not_working_is_not_paused(world: Any, state: str) -> None:
    Run.objects.update(state=state)
    world.run.refresh_from_db()
    with pytest.raises(CannotDo, match=f"found one {state}"):
        lifecycle.pause(world.run, actor=world.run.owner)


def test_a_second_pause_does_nothing_and_pausing_is_not_sent_on(world: Any) -> None:
    pause(world)
    assert not lifecycle.pause(world.run, actor=world.run.owner)
    with pytest.raises(CannotDo, match="still being released"):
        lifecycle.unpause(world.run, actor=world.run.owner)
    with pytest.raises(IllegalTransition, match="a run that is pausing"):
        replicas_and_pools.restart_replica(world.replica(0), actor=world.run.owner)


def test_a_pause_has_an_event_with_its_actor(world: Any) -> None:
    pause(world)
    event = world.run.events.get(to_state="pausing")
    assert (event.actor, event.message) == (world.run.owner, "paused by olga")


# Resuming.


def everybody_dies(world: Any) -> None:
    while world.run.state != "failed":
        for attempt in ReplicaAttempt.objects.filter(replica__run=world.run, ended_at=None):
            world.executor.end(attempt.launch_key, Cause.ERROR, code=1, said="boom")
        world.tick()
        world.clock.pass_s(retry_policy.BACKOFF_CAP_S)
        world.tick()
        world.work()


def test_a_run_whose_replicas_all_died_goes_on_where_it_was(world: Any) -> None:
    world.bucket.commit(1, (0, 1))
    everybody_dies(world)
    assert world.run.state == "failed"
    attempts = [r.attempts.count() for r in world.run.replicas.all()]
    assert lifecycle.resume(world.run, actor=world.run.owner)
    assert states(world) == ["restarting", "restarting"]
    world.run.refresh_from_db()
    assert (world.run.state, world.run.ended_at) == ("queued", None)
    launch(world)
    assert [r.attempts.count() for r in world.run.replicas.all()] == [n + 1 for n in attempts]
    assert [c.command for c in commands(world)] == ["resume"]
    for number in (0, 1):
        world.bucket.beat(number, 1, "computing", seq=9)
    world.tick()
    assert world.run.state == "running"
    assert world.run.next_round == 2


def test_a_stopped_run_without_final_weights_goes_on_and_can_be_stopped_again(world: Any) -> None:
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    for number in (0, 1):
        world.executor.end(world.key(number), Cause.CANCELLED)
    world.tick()
    world.tick()
    assert world.run.state == "cancelled"
    assert lifecycle.resume(world.run, actor=world.run.owner)
    launch(world)
    assert [c.command for c in commands(world)] == ["stop", "resume"]
    world.bucket.beat(0, 1, "computing", seq=2)
    world.tick()
    assert world.run.state == "degraded"
    world.run.refresh_from_db()
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    assert [c.command for c in commands(world)] == ["stop", "resume", "stop"]


def test_a_run_with_final_weights_is_not_resumed(world: Any) -> None:
    world.bucket.final(2, "stopped")
    world.tick()
    for number in (0, 1):
        world.executor.end(world.key(number), Cause.DONE, code=0)
    world.tick()
    assert world.run.state == "cancelled"
    with pytest.raises(CannotDo, match="fork a new run from its newest checkpoint"):
        lifecycle.resume(world.run, actor=world.run.owner)


def test_final_weights_that_only_the_bucket_knows_of_end_the_launch(world: Any) -> None:
    everybody_dies(world)
    lifecycle.resume(world.run, actor=world.run.owner)
    world.bucket.final(2)
    launch(world)
    assert world.run.state == "failed"
    assert "what is final does not change" in world.run.state_reason


def test_a_run_whose_machines_are_not_all_gone_waits(world: Any) -> None:
    Run.objects.update(state="cancelled")
    world.run.refresh_from_db()
    with pytest.raises(CannotDo, match="still being released"):
        lifecycle.resume(world.run, actor=world.run.owner)


def test_one_of_two_resumes_does_it(world: Any) -> None:
    everybody_dies(world)
    other = Run.objects.get(pk=world.run.pk)
    assert lifecycle.resume(world.run, actor=world.run.owner)
    assert not lifecycle.resume(other, actor=world.run.owner)
    assert world.run.events.filter(to_state="queued", from_state="failed").count() == 1


# Saving and ending by force.


def test_a_checkpoint_that_is_asked_for_is_asked_for_once(world: Any) -> None:
    world.bucket.commit(1, (0, 1))
    world.beat_all()
    world.tick()
    assert lifecycle.save(world.run, actor=world.run.owner)
    world.run.refresh_from_db()
    world.beat_all()
    world.tick()
    world.beat_all()
    world.tick()
    [command] = commands(world)
    assert (command.command, command.replica, command.arguments) == ("save", None, {"round": 1})
    world.clock.pass_s(1)
    lifecycle.save(world.run, actor=world.run.owner)
    world.bucket.commit(2, (0, 1))
    world.tick()
    world.tick()
    assert [c.arguments["round"] for c in commands(world)] == [1, 2]


def test_only_a_run_that_trains_is_saved(world: Any) -> None:
    pause(world)
    with pytest.raises(CannotDo, match="found one pausing"):
        lifecycle.save(world.run, actor=world.run.owner)


def test_a_stop_by_force_ends_the_jobs_at_once(world: Any) -> None:
    assert lifecycle.force_stop(world.run, actor=world.run.owner)
    world.tick()
    assert set(world.executor.cancelled) == {world.key(0), world.key(1)}
    assert world.run.state == "stopping"
    assert commands(world) == []  # or replicas would use the time they have for final weights
    assert not lifecycle.force_stop(world.run, actor=world.run.owner)


def test_a_stop_can_be_made_one_by_force(world: Any) -> None:
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    assert world.executor.cancelled == []
    assert lifecycle.force_stop(world.run, actor=world.run.owner)
    world.tick()
    assert set(world.executor.cancelled) == {world.key(0), world.key(1)}
    assert world.run.events.get(kind="force_stop").actor == world.run.owner


# What it says of itself.


def test_notes_and_tags_are_told_once(world: Any) -> None:
    olga = world.run.owner
    words = {"notes": " why \x00we did it ", "tags": ["b", "a", "b", " "], "actor": olga}
    assert lifecycle.describe(world.run, **words)
    assert not lifecycle.describe(world.run, **words)
    world.run.refresh_from_db()
    assert world.run.tags == ["b", "a"]
    assert world.run.notes == "why �we did it"
    assert world.run.events.get(kind="described").message == "notes changed; tags: b, a"


@pytest.mark.parametrize("tag", ["a b", "a,b", "tag:x", "x" * 41, "a\nb"])
def test_what_is_no_tag_is_refused(world: Any, tag: str) -> None:
    with pytest.raises(CannotDo, match="expected tags"):
        lifecycle.describe(world.run, notes="", tags=[tag], actor=world.run.owner)


def test_only_what_is_over_is_archived_and_a_resume_takes_it_back(world: Any) -> None:
    olga = world.run.owner
    with pytest.raises(CannotDo, match="found one running"):
        lifecycle.archive(world.run, actor=olga)
    everybody_dies(world)
    assert lifecycle.archive(world.run, actor=olga)
    assert not lifecycle.archive(world.run, actor=olga)
    assert isinstance(world.run.archived_at, datetime.datetime)
    lifecycle.resume(world.run, actor=olga)
    world.run.refresh_from_db()
    assert world.run.archived_at is None
