"""How a run ends: by its final manifest, a stop, the time limit; and what people do to replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import Command
from executors.base import Cause
from runs.actions import replicas_and_pools
from runs.exceptions import IllegalTransition
from runs.ingest import rounds as history
from runs.ingest.stores import store_for
from runs.models import Run, TelemetryCursor
from runs.queries.selectors import DRAIN_FOR, runs_to_look_after
from runs.reconcile.bucket_writes import write_run
from runs.reconcile.jobs import GIVE_UP_AFTER
from runs.reconcile.launch import launch_run
from runs.reconcile.reconciler import reconcile_run
from runs.reconcile.retry_policy import DRAIN_FLOOR_S as STOP_GRACE_S
from tests.runs.world import Bucket

pytestmark = pytest.mark.django_db
MakeWorld = Callable[..., Any]


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    made = make_world(replicas=2)
    made.start()
    assert made.run.state == "running"
    return made


def states(world: Any) -> list[str]:
    return list(world.run.replicas.values_list("state", flat=True))


def commands(world: Any) -> list[Command]:
    store = world.bucket.store
    found = [i.key for i in store.list(keys.CONTROL) if not i.key.startswith(keys.JOURNAL)]
    return [Command.from_bytes(store.get(key)) for key in found]


def end_all(world: Any, cause: Cause, code: int = 0) -> None:
    for key in world.executor.jobs:
        world.executor.end(key, cause, code=code)


def test_the_final_manifest_is_success(world: Any) -> None:
    world.bucket.commit(1, [0, 1])
    world.bucket.final(1)
    world.beat_all("done")
    run = world.tick()
    assert (run.state, run.state_reason) == ("succeeded", "completed at round 1")
    assert run.watched_round == 1  # nothing of it is to be judged any more
    assert states(world) == ["done", "done"]
    [checkpoint] = run.checkpoints.all()
    assert (checkpoint.final, checkpoint.round, checkpoint.size_bytes) == (True, 1, 4096)
    end_all(world, Cause.DONE)
    world.tick()
    assert not world.run.replicas.filter(attempts__ended_at=None).exists()
    assert world.executor.cancelled == []


def test_a_run_ends_when_the_last_of_its_rounds_was_read(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was away: the whole run is in the bucket, and a tick reads but a part of it."""
    monkeypatch.setattr(history, "COMMITS_PER_TICK", 2)
    for number in range(1, 6):
        world.bucket.commit(number, [0, 1])
    world.bucket.final(5)
    world.beat_all("done")
    end_all(world, Cause.DONE)
    seen = []
    while not seen or (runs_to_look_after().exists() and len(seen) < 9):
        run = world.tick()
        seen.append((str(run.state), run.committed_rounds))
    *before, last = seen
    assert last == ("succeeded", 5)
    assert before
    assert {state for state, _ in before} == {"running"}
    assert max(rounds for _, rounds in before) < 5
    assert list(run.rounds.values_list("state", flat=True)) == ["committed"] * 5


def test_replicas_that_end_before_their_done_beat_was_seen_are_done(world: Any) -> None:
    world.bucket.final(1)
    end_all(world, Cause.DONE)
    assert world.tick().state == "succeeded"
    assert states(world) == ["done", "done"]


def test_a_stop_is_one_command_however_often_it_is_asked(world: Any) -> None:
    assert replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    assert world.outbox[-1] == ("reconcile_run", str(world.run.pk))
    stale = Run.objects.get(pk=world.run.pk)
    assert not replicas_and_pools.request_stop(stale, actor=world.run.owner)
    for _ in range(3):
        world.beat_all()
        run = world.tick()
    [command] = commands(world)
    assert (command.n, command.command, command.replica) == (1, "stop", None)
    assert run.state == "stopping"
    assert world.executor.cancelled == []
    world.bucket.final(2, "stopped")
    run = world.tick()
    assert (run.state, run.state_reason) == ("cancelled", "stopped by olga at round 2")
    [event] = run.events.filter(to_state="stopping")
    assert event.actor == world.run.owner


def test_a_stop_whose_note_was_lost_writes_no_second_command(world: Any) -> None:
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    Run.objects.filter(pk=world.run.pk).update(stop_sent_at=None, next_command=1)
    world.tick()
    assert len(commands(world)) == 1
    world.run.refresh_from_db()
    assert world.run.next_command == 2
    assert world.run.stop_sent_at is not None


def test_a_stop_takes_the_next_free_number(world: Any) -> None:
    theirs = Command(n=1, command="rest", wall_s=0.0)
    world.bucket.store.create(keys.control(1), theirs.to_bytes())
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    assert [(c.n, c.command) for c in commands(world)] == [(1, "rest"), (2, "stop")]
    assert world.run.next_command == 3


def test_who_does_not_end_in_time_is_cancelled(world: Any) -> None:
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick(STOP_GRACE_S - 1)
    assert world.executor.cancelled == []
    assert world.tick(2).state == "stopping"
    assert sorted(world.executor.cancelled) == sorted(world.executor.jobs)
    end_all(world, Cause.CANCELLED, -15)
    run = world.tick()
    assert run.state == "cancelled"
    assert run.state_reason == "stopped by olga; no final weights were written"
    assert states(world) == ["evicted", "evicted"]
    world.tick()
    assert world.executor.launches == 2


def test_a_stop_that_lost_a_race_looks_again(world: Any) -> None:
    stale = Run.objects.get(pk=world.run.pk)
    Run.objects.filter(pk=world.run.pk).update(state="degraded")
    assert replicas_and_pools.request_stop(stale, actor=world.run.owner)
    assert stale.state == "stopping"
    Run.objects.filter(pk=world.run.pk).update(state="running")
    stale = Run.objects.get(pk=world.run.pk)
    Run.objects.filter(pk=world.run.pk).update(state="succeeded")
    assert not replicas_and_pools.request_stop(stale, actor=world.run.owner)
    assert stale.state == "succeeded"


def test_the_time_limit_stops_the_run(make_world: MakeWorld) -> None:
    world = make_world(time_limit_s=100)
    world.start()
    world.beat_all()
    assert world.tick(100).state == "running"
    world.beat_all()
    assert world.tick(1).state == "stopping"
    assert world.run.state_reason == "time limit of 100 s reached"
    world.tick()
    assert [c.command for c in commands(world)] == ["stop"]
    assert world.run.events.get(to_state="stopping").actor is None


def test_a_run_that_is_over_lets_go_of_who_never_started(make_world: MakeWorld) -> None:
    world = make_world(replicas=3)
    world.run.replicas.filter(number=2).update(state="restarting")
    world.replica(2).attempts.update(ended_at=world.clock(), cause="lost")
    world.beat_all("done", but=(2,))
    world.bucket.final(1)
    world.tick()
    assert world.tick().state == "succeeded"
    assert states(world) == ["done", "done", "evicted"]
    assert world.replica(2).state_reason == "the run is over"


def test_jobs_left_over_are_cancelled_after_the_grace(world: Any) -> None:
    world.bucket.final(1)
    assert world.tick().state == "succeeded"
    world.tick(STOP_GRACE_S - 2)
    assert world.executor.cancelled == []
    world.tick(4)
    assert sorted(world.executor.cancelled) == sorted(world.executor.jobs)
    assert list(runs_to_look_after()) == [world.run]


def test_a_run_is_looked_after_until_its_last_word_was_read(world: Any) -> None:
    assert list(runs_to_look_after()) == [world.run]
    world.bucket.segment(0, 1, losses=[5.0])
    world.bucket.final(1)
    world.beat_all("done")
    world.tick()
    end_all(world, Cause.DONE)
    world.bucket.segment(0, 2, losses=[4.0], first=2)
    world.control()
    world.ingest()
    world.control()
    assert world.run.state == "succeeded"
    assert list(runs_to_look_after()) == [world.run]  # there may be a third segment
    world.tick()
    world.tick()
    assert list(runs_to_look_after()) == []
    assert world.replica(0).loss == 4.5


def test_a_run_that_is_over_is_not_waited_for_for_ever(world: Any) -> None:
    Run.objects.filter(pk=world.run.pk).update(state="succeeded", ended_at=world.clock())
    world.run.replicas.update(state="done")
    for number in (0, 1):
        world.replica(number).attempts.update(ended_at=world.clock())
    assert list(runs_to_look_after()) == [world.run]  # cursors are open
    world.clock.pass_s(DRAIN_FOR.total_seconds() + 1)
    assert list(runs_to_look_after()) == []
    # There was so much to read, after a day without a server, that it still comes.
    Run.objects.update(last_seen_at=world.clock())
    assert list(runs_to_look_after()) == [world.run]
    world.clock.pass_s(DRAIN_FOR.total_seconds() + 1)
    assert list(runs_to_look_after()) == []


def test_a_replica_a_person_stops_leaves_for_good(world: Any) -> None:
    replica = world.replica(1)
    assert replicas_and_pools.stop_replica(replica, actor=world.run.owner)
    assert not replicas_and_pools.stop_replica(world.replica(1), actor=world.run.owner)
    world.beat_all()
    world.tick()
    assert world.executor.cancelled == []  # asked, and given time
    world.executor.end(world.key(1), Cause.DONE, code=0)
    world.beat_all(but=(1,))
    run = world.tick()
    assert (run.state, states(world)) == ("degraded", ["computing", "evicted"])
    world.beat_all(but=(1,))
    world.tick(120)
    world.work()
    assert world.executor.launches == 2


def test_a_replica_a_person_restarts_is_a_new_job_of_the_same_number(world: Any) -> None:
    assert replicas_and_pools.restart_replica(world.replica(1), actor=world.run.owner)
    world.outbox.clear()
    world.tick()
    assert world.executor.cancelled == []
    assert world.outbox == []  # the old one has not ended
    world.executor.end(world.key(1), Cause.CANCELLED, code=-15)
    world.tick()
    world.work()
    assert world.replica(1).attempts.count() == 2
    world.bucket.beat(1, 1, "syncing", seq=2)
    world.tick()
    replica = world.replica(1)
    assert (replica.state, replica.restarts) == ("syncing", 0)  # asked for, so not counted


def test_a_run_that_is_over_restarts_nobody(world: Any) -> None:
    Run.objects.filter(pk=world.run.pk).update(state="succeeded")
    with pytest.raises(IllegalTransition, match="of a run that is succeeded"):
        replicas_and_pools.restart_replica(world.replica(1), actor=world.run.owner)


def test_the_last_replica_a_person_stops_ends_the_run(world: Any) -> None:
    for number in (0, 1):
        replicas_and_pools.stop_replica(world.replica(number), actor=world.run.owner)
    end_all(world, Cause.DONE)
    run = world.tick()
    assert (run.state, states(world)) == ("failed", ["evicted", "evicted"])


def look_after(clock: Any) -> int:
    """Ticks of beat until no run needs one."""
    for ticks in range(5):
        runs = list(runs_to_look_after())
        if not runs:
            return ticks
        clock.pass_s(1)
        for run in runs:
            reconcile_run(str(run.pk))
    raise AssertionError(f"{runs} are looked after for ever")


def test_a_run_stopped_before_it_was_launched_leaves_the_bucket_alone(
    make_run: Any, clock: Any, executor: Any
) -> None:
    other, run = make_run(name="The prefix is another's"), make_run()
    store = store_for(run)
    launch_run(str(other.pk))
    store.put(keys.GROUP, store_for(other).get(keys.GROUP))
    Bucket(store).beat(0, 1)
    before = [info.key for info in store.list("")]
    Run.objects.filter(pk=other.pk).delete()
    replicas_and_pools.request_stop(run, actor=run.owner)
    look_after(clock)
    run.refresh_from_db()
    assert (run.state, run.state_reason.split(";")[0]) == ("cancelled", "stopped by olga")
    assert set(run.replicas.values_list("state", flat=True)) == {"evicted"}
    assert [info.key for info in store.list("")] == before
    assert not run.replicas.exclude(incarnation="").exists()


def test_a_run_that_could_not_be_launched_keeps_no_replica_waiting(
    make_run: Any, clock: Any, executor: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    run = make_run(rendezvous=f"{tmp_path}/file/run")
    launch_run(str(run.pk))
    look_after(clock)
    assert set(run.replicas.values_list("state", flat=True)) == {"evicted"}
    assert not run.events.filter(kind="store").exists()


def test_a_stopped_run_does_not_wait_for_ever_for_a_backend_that_is_gone(world: Any) -> None:
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    world.executor.away = "401 the token was revoked"
    world.tick(GIVE_UP_AFTER.total_seconds() - 60)
    assert world.run.state == "stopping"
    world.tick(120)
    world.tick()
    run = world.tick()
    assert run.state == "cancelled"
    assert set(states(world)) <= {"lost", "evicted"}
    attempt = world.replica(0).attempts.get()
    assert (attempt.cause, attempt.message[:8]) == ("lost", "given up")
    world.tick(60)
    world.work()
    assert world.executor.launches == 2


def test_the_last_beat_is_read_although_the_run_has_ended_before(world: Any) -> None:
    """All telemetry was read, and the process ends between two passes."""
    world.bucket.final(1)
    world.beat_all("uploading")
    world.tick()
    world.beat_all("done")
    end_all(world, Cause.DONE)
    TelemetryCursor.objects.update(ended=True)

    def control() -> None:
        for _ in range(3):
            world.control()
            write_run(str(world.run.pk))

    control()
    assert list(runs_to_look_after()) == [world.run]
    world.ingest()
    control()
    assert list(runs_to_look_after()) == []
    assert {replica.beat_state for replica in world.run.replicas.all()} == {"done"}
