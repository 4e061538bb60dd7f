"""Pause, resume, save and forced stop of a run."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import Command
from executors.base import Cause
from runs.actions import lifecycle, replicas_and_pools
from runs.exceptions import ActionRefused, IllegalTransition
from runs.models import ReplicaAttempt, Run
from runs.queries.selectors import runs_to_reconcile
from runs.reconcile import retry_policy

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    def begin(harness: Any) -> None:
        harness.bucket.segment(0, 1, losses=(3.0,))
        harness.start()

    return share_harness(begin, replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def commands(harness: Any) -> list[Command]:
    store = harness.bucket.store
    result = [i.key for i in store.list(keys.CONTROL) if not i.key.startswith(keys.JOURNAL)]
    return [Command.from_bytes(store.get(key)) for key in result]


def pause(harness: Any) -> None:
    assert lifecycle.pause(harness.run, actor=harness.run.owner)
    harness.tick()


def drain_all_jobs(harness: Any, seq: int = 1) -> None:
    """End every job as a drained replica does."""
    for attempt in ReplicaAttempt.objects.filter(replica__run=harness.run, ended_at=None):
        harness.bucket.beat(attempt.replica.number, 99, "left", seq=seq)
        harness.executor.end(attempt.launch_key, Cause.DONE, code=0)
    harness.tick()


def launch(harness: Any) -> None:
    """Run a worker's tasks for a resumed run."""
    from runs.reconcile.launch import launch_run

    launch_run(str(harness.run.pk))
    harness.run.refresh_from_db()
    harness.work()


def states(harness: Any) -> list[str]:
    return [r.state for r in harness.run.replicas.order_by("number")]


# A pause.


def test_a_pause_drains_every_replica_and_releases_the_machines(harness: Any) -> None:
    pause(harness)
    assert harness.run.state == "pausing"
    assert states(harness) == ["restarting", "restarting"]
    assert [(c.command, c.replica) for c in commands(harness)] == [("drain", 0), ("drain", 1)]
    assert commands(harness)[0].arguments["within_s"] == retry_policy.DRAIN_FLOOR_S
    assert harness.executor.cancelled == []
    drain_all_jobs(harness)
    assert (harness.run.state, harness.run.state_reason) == ("paused", "all machines are released")
    assert harness.outbox == [("reconcile_run", str(harness.run.pk))]
    assert not ReplicaAttempt.objects.filter(ended_at=None).exists()


def test_a_replica_that_does_not_exit_in_time_is_ended_and_not_billed(harness: Any) -> None:
    pause(harness)
    harness.tick(retry_policy.DRAIN_FLOOR_S + 1)
    assert set(harness.executor.cancelled) == {harness.key(0), harness.key(1)}
    assert harness.run.state == "pausing"


def test_a_paused_run_launches_nothing_and_needs_no_control(harness: Any) -> None:
    pause(harness)
    drain_all_jobs(harness)
    harness.outbox.clear()
    harness.tick(3600)
    assert harness.outbox == []
    assert harness.run.state == "paused"
    assert harness.run not in runs_to_reconcile()


def test_a_resumed_run_has_the_same_replicas(harness: Any) -> None:
    pause(harness)
    drain_all_jobs(harness)
    harness.clock.pass_s(3600)
    assert lifecycle.unpause(harness.run, actor=harness.run.owner)
    launch(harness)
    assert harness.run.state == "provisioning"
    assert [r.attempts.count() for r in harness.run.replicas.all()] == [2, 2]
    harness.tick()
    assert harness.run.state == "provisioning"  # not stalled: it is on its way
    harness.bucket.beat(0, 1, "computing", seq=2)
    harness.tick()
    assert harness.run.state == "degraded"
    harness.bucket.beat(1, 1, "computing", seq=2)
    harness.bucket.beat(0, 2, "computing", seq=2)
    harness.tick()
    assert harness.run.state == "running"
    assert harness.replica(0).restarts == 0


def test_the_time_of_a_pause_counts_towards_no_limit(make_harness: Callable[..., Any]) -> None:
    harness = make_harness(replicas=2, time_limit_s=600)
    harness.start()
    pause(harness)
    drain_all_jobs(harness)
    harness.clock.pass_s(7200)
    lifecycle.unpause(harness.run, actor=harness.run.owner)
    launch(harness)
    for count in (1, 2):
        harness.bucket.beat(0, count, "computing", seq=2)
        harness.bucket.beat(1, count, "computing", seq=2)
        harness.tick()
    assert harness.run.state == "running"
    assert harness.run.idle_s == pytest.approx(7200, abs=5)
    harness.bucket.beat(0, 3, "computing", seq=2)
    harness.tick(700)
    assert harness.run.state == "stopping"


def test_a_long_pause_is_not_a_stall(harness: Any) -> None:
    for round in (1, 2):
        harness.bucket.commit(round, (0, 1))
    harness.beat_all()
    harness.tick()
    assert harness.run.round_s is not None
    pause(harness)
    drain_all_jobs(harness)
    harness.clock.pass_s(7200)
    lifecycle.unpause(harness.run, actor=harness.run.owner)
    launch(harness)
    for number in (0, 1):
        harness.bucket.beat(number, 1, "computing", seq=2)
    harness.tick()
    assert harness.run.state == "running"


def test_a_paused_run_can_be_stopped(harness: Any) -> None:
    pause(harness)
    drain_all_jobs(harness)
    assert replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert harness.run.state == "cancelled"
    harness.tick()
    assert states(harness) == ["evicted", "evicted"]


def test_a_launch_that_succeeds_during_a_pause_is_ended(
    make_harness: Callable[..., Any],
) -> None:
    harness = make_harness(replicas=1)
    harness.run.refresh_from_db()
    ReplicaAttempt.objects.update(handle=None)
    assert lifecycle.pause(harness.run, actor=harness.run.owner)
    harness.tick()
    assert harness.run.state == "pausing"
    assert harness.executor.cancelled == [harness.key(0)]


@pytest.mark.parametrize("state", ["queued", "stopping", "succeeded", "failed", "cancelled"])
def test_only_an_active_run_is_paused(harness: Any, state: str) -> None:
    Run.objects.update(state=state)
    harness.run.refresh_from_db()
    with pytest.raises(ActionRefused, match=f"found one {state}"):
        lifecycle.pause(harness.run, actor=harness.run.owner)


def test_a_second_pause_does_nothing_and_a_pausing_run_is_not_resumed(harness: Any) -> None:
    pause(harness)
    assert not lifecycle.pause(harness.run, actor=harness.run.owner)
    with pytest.raises(ActionRefused, match="still being released"):
        lifecycle.unpause(harness.run, actor=harness.run.owner)
    with pytest.raises(IllegalTransition, match="a run that is pausing"):
        replicas_and_pools.restart_replica(harness.replica(0), actor=harness.run.owner)


def test_a_pause_has_an_event_with_its_actor(harness: Any) -> None:
    pause(harness)
    event = harness.run.events.get(to_state="pausing")
    assert (event.actor, event.message) == (harness.run.owner, "paused by olga")


# Resuming.


def fail_all_replicas(harness: Any) -> None:
    while harness.run.state != "failed":
        for attempt in ReplicaAttempt.objects.filter(replica__run=harness.run, ended_at=None):
            harness.executor.end(attempt.launch_key, Cause.ERROR, code=1, message="boom")
        harness.tick()
        harness.clock.pass_s(retry_policy.BACKOFF_CAP_S)
        harness.tick()
        harness.work()


def test_a_run_whose_replicas_all_died_is_resumed(harness: Any) -> None:
    harness.bucket.commit(1, (0, 1))
    fail_all_replicas(harness)
    assert harness.run.state == "failed"
    attempts = [r.attempts.count() for r in harness.run.replicas.all()]
    assert lifecycle.resume(harness.run, actor=harness.run.owner)
    assert states(harness) == ["restarting", "restarting"]
    harness.run.refresh_from_db()
    assert (harness.run.state, harness.run.ended_at) == ("queued", None)
    launch(harness)
    assert [r.attempts.count() for r in harness.run.replicas.all()] == [n + 1 for n in attempts]
    assert [c.command for c in commands(harness)] == ["resume"]
    for number in (0, 1):
        harness.bucket.beat(number, 1, "computing", seq=9)
    harness.tick()
    assert harness.run.state == "running"
    assert harness.run.next_round == 2


def test_a_stopped_run_without_final_weights_resumes_and_can_be_stopped_again(harness: Any) -> None:
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    for number in (0, 1):
        harness.executor.end(harness.key(number), Cause.CANCELLED)
    harness.tick()
    harness.tick()
    assert harness.run.state == "cancelled"
    assert lifecycle.resume(harness.run, actor=harness.run.owner)
    launch(harness)
    assert [c.command for c in commands(harness)] == ["stop", "resume"]
    harness.bucket.beat(0, 1, "computing", seq=2)
    harness.tick()
    assert harness.run.state == "degraded"
    harness.run.refresh_from_db()
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert [c.command for c in commands(harness)] == ["stop", "resume", "stop"]


def test_a_run_with_final_weights_is_not_resumed(harness: Any) -> None:
    harness.bucket.final(2, "stopped")
    harness.tick()
    for number in (0, 1):
        harness.executor.end(harness.key(number), Cause.DONE, code=0)
    harness.tick()
    assert harness.run.state == "cancelled"
    with pytest.raises(ActionRefused, match="fork a new run from its newest checkpoint"):
        lifecycle.resume(harness.run, actor=harness.run.owner)


def test_final_weights_in_the_bucket_end_the_launch(harness: Any) -> None:
    fail_all_replicas(harness)
    lifecycle.resume(harness.run, actor=harness.run.owner)
    harness.bucket.final(2)
    launch(harness)
    assert harness.run.state == "failed"
    assert "a finished run can't be resumed" in harness.run.state_reason


def test_a_run_is_not_resumed_before_all_its_jobs_have_ended(harness: Any) -> None:
    Run.objects.update(state="cancelled")
    harness.run.refresh_from_db()
    with pytest.raises(ActionRefused, match="still being released"):
        lifecycle.resume(harness.run, actor=harness.run.owner)


def test_only_one_of_two_concurrent_resumes_takes_effect(harness: Any) -> None:
    fail_all_replicas(harness)
    other = Run.objects.get(pk=harness.run.pk)
    assert lifecycle.resume(harness.run, actor=harness.run.owner)
    assert not lifecycle.resume(other, actor=harness.run.owner)
    assert harness.run.events.filter(to_state="queued", from_state="failed").count() == 1


def test_a_run_whose_deletion_was_requested_meanwhile_is_not_resumed(harness: Any) -> None:
    """It would be deleted when it ends."""
    fail_all_replicas(harness)
    other = Run.objects.get(pk=harness.run.pk)
    lifecycle.delete(harness.run, actor=harness.run.owner, name=harness.run.name, objects=True)
    with pytest.raises(ActionRefused, match="it is being deleted"):
        lifecycle.resume(other, actor=harness.run.owner)
    other.refresh_from_db()
    assert other.state == "failed"


# Saving and ending by force.


def test_a_requested_checkpoint_is_requested_once(harness: Any) -> None:
    harness.bucket.commit(1, (0, 1))
    harness.beat_all()
    harness.tick()
    assert lifecycle.save(harness.run, actor=harness.run.owner)
    harness.run.refresh_from_db()
    harness.beat_all()
    harness.tick()
    harness.beat_all()
    harness.tick()
    [command] = commands(harness)
    assert (command.command, command.replica, command.arguments) == ("save", None, {"round": 1})
    harness.clock.pass_s(1)
    lifecycle.save(harness.run, actor=harness.run.owner)
    harness.bucket.commit(2, (0, 1))
    harness.tick()
    harness.tick()
    assert [c.arguments["round"] for c in commands(harness)] == [1, 2]


def test_only_a_run_that_trains_is_saved(harness: Any) -> None:
    pause(harness)
    with pytest.raises(ActionRefused, match="found one pausing"):
        lifecycle.save(harness.run, actor=harness.run.owner)


def test_a_stop_by_force_ends_the_jobs_at_once(harness: Any) -> None:
    assert lifecycle.force_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert set(harness.executor.cancelled) == {harness.key(0), harness.key(1)}
    assert harness.run.state == "stopping"
    assert commands(harness) == []  # or replicas would use the time they have for final weights
    assert not lifecycle.force_stop(harness.run, actor=harness.run.owner)


def test_a_stop_can_be_escalated_to_a_forced_stop(harness: Any) -> None:
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert harness.executor.cancelled == []
    assert lifecycle.force_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert set(harness.executor.cancelled) == {harness.key(0), harness.key(1)}
    assert harness.run.events.get(kind="force_stop").actor == harness.run.owner


# Description.


def test_changes_of_notes_and_tags_are_recorded_once(harness: Any) -> None:
    operator_user = harness.run.owner
    text = {"notes": " why \x00we did it ", "tags": ["b", "a", "b", " "], "actor": operator_user}
    assert lifecycle.describe(harness.run, **text)
    assert not lifecycle.describe(harness.run, **text)
    harness.run.refresh_from_db()
    assert harness.run.tags == ["b", "a"]
    assert harness.run.notes == "why �we did it"
    assert harness.run.events.get(kind="described").message == "notes changed; tags: b, a"


def test_notes_and_tags_that_are_not_sent_keep_what_others_have_written(harness: Any) -> None:
    """A request changes a run that it has read before another request changed it."""
    run = harness.run
    Run.objects.filter(pk=run.pk).update(notes="by another", tags=["x"])
    assert lifecycle.describe(run, more_tags=["b", "x"], actor=run.owner)
    run.refresh_from_db()
    assert (run.notes, run.tags) == ("by another", ["x", "b"])
    Run.objects.filter(pk=run.pk).update(tags=["y"])
    assert lifecycle.describe(run, notes="new", actor=run.owner)
    run.refresh_from_db()
    assert (run.notes, run.tags) == ("new", ["y"])


@pytest.mark.parametrize("tag", ["a b", "a,b", "tag:x", "x" * 41, "a\nb"])
def test_an_invalid_tag_is_refused(harness: Any, tag: str) -> None:
    with pytest.raises(ActionRefused, match="expected tags"):
        lifecycle.describe(harness.run, notes="", tags=[tag], actor=harness.run.owner)


def test_only_an_ended_run_is_archived_and_a_resume_restores_it(harness: Any) -> None:
    operator_user = harness.run.owner
    with pytest.raises(ActionRefused, match="found one running"):
        lifecycle.archive(harness.run, actor=operator_user)
    fail_all_replicas(harness)
    assert lifecycle.archive(harness.run, actor=operator_user)
    assert not lifecycle.archive(harness.run, actor=operator_user)
    assert isinstance(harness.run.archived_at, datetime.datetime)
    lifecycle.resume(harness.run, actor=operator_user)
    harness.run.refresh_from_db()
    assert harness.run.archived_at is None
