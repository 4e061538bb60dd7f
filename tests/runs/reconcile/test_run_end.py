"""The end of a run: by final manifest, stop or time limit; and operators' actions on replicas."""

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
from runs.queries.selectors import DRAIN_FOR, runs_to_reconcile
from runs.reconcile.bucket_writes import write_run
from runs.reconcile.jobs import GIVE_UP_AFTER
from runs.reconcile.launch import launch_run
from runs.reconcile.reconciler import reconcile_run
from runs.reconcile.retry_policy import DRAIN_FLOOR_S as STOP_GRACE_S
from tests.runs.run_harness import Bucket

pytestmark = pytest.mark.django_db
MakeHarness = Callable[..., Any]


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def states(harness: Any) -> list[str]:
    return list(harness.run.replicas.values_list("state", flat=True))


def commands(harness: Any) -> list[Command]:
    store = harness.bucket.store
    result = [i.key for i in store.list(keys.CONTROL) if not i.key.startswith(keys.JOURNAL)]
    return [Command.from_bytes(store.get(key)) for key in result]


def end_all(harness: Any, cause: Cause, code: int = 0) -> None:
    for key in harness.executor.jobs:
        harness.executor.end(key, cause, code=code)


def test_the_final_manifest_is_success(harness: Any) -> None:
    harness.bucket.commit(1, [0, 1])
    harness.bucket.final(1)
    harness.beat_all("done")
    run = harness.tick()
    assert (run.state, run.state_reason) == ("succeeded", "completed at round 1")
    assert run.watched_round == 1  # no alert rule remains to be evaluated
    assert states(harness) == ["done", "done"]
    [checkpoint] = run.checkpoints.all()
    assert (checkpoint.final, checkpoint.round, checkpoint.size_bytes) == (True, 1, 4096)
    end_all(harness, Cause.DONE)
    harness.tick()
    assert not harness.run.replicas.filter(attempts__ended_at=None).exists()
    assert harness.executor.cancelled == []


def test_a_run_ends_once_its_last_round_is_read(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was down: the bucket has the whole run, and one tick reads only a part of it."""
    monkeypatch.setattr(history, "COMMITS_PER_TICK", 2)
    for number in range(1, 6):
        harness.bucket.commit(number, [0, 1])
    harness.bucket.final(5)
    harness.beat_all("done")
    end_all(harness, Cause.DONE)
    seen = []
    while not seen or (runs_to_reconcile().exists() and len(seen) < 9):
        run = harness.tick()
        seen.append((str(run.state), run.committed_rounds))
    *before, last = seen
    assert last == ("succeeded", 5)
    assert before
    assert {state for state, _ in before} == {"running"}
    assert max(rounds for _, rounds in before) < 5
    assert list(run.rounds.values_list("state", flat=True)) == ["committed"] * 5


def test_replicas_that_end_before_their_last_heartbeat_is_read_are_done(harness: Any) -> None:
    harness.bucket.final(1)
    end_all(harness, Cause.DONE)
    assert harness.tick().state == "succeeded"
    assert states(harness) == ["done", "done"]


def test_repeated_stop_requests_send_one_command(harness: Any) -> None:
    assert replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    assert harness.outbox[-1] == ("reconcile_run", str(harness.run.pk))
    stale = Run.objects.get(pk=harness.run.pk)
    assert not replicas_and_pools.request_stop(stale, actor=harness.run.owner)
    for _ in range(3):
        harness.beat_all()
        run = harness.tick()
    [command] = commands(harness)
    assert (command.n, command.command, command.replica) == (1, "stop", None)
    assert run.state == "stopping"
    assert harness.executor.cancelled == []
    harness.bucket.final(2, "stopped")
    run = harness.tick()
    assert (run.state, run.state_reason) == ("cancelled", "stopped by olga at round 2")
    [event] = run.events.filter(to_state="stopping")
    assert event.actor == harness.run.owner


def test_a_stop_whose_record_was_lost_writes_no_second_command(harness: Any) -> None:
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    Run.objects.filter(pk=harness.run.pk).update(stop_sent_at=None, next_command=1)
    harness.tick()
    assert len(commands(harness)) == 1
    harness.run.refresh_from_db()
    assert harness.run.next_command == 2
    assert harness.run.stop_sent_at is not None


def test_a_stop_takes_the_next_free_number(harness: Any) -> None:
    foreign = Command(n=1, command="rest", wall_s=0.0)
    harness.bucket.store.create(keys.control(1), foreign.to_bytes())
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert [(c.n, c.command) for c in commands(harness)] == [(1, "rest"), (2, "stop")]
    assert harness.run.next_command == 3


def test_a_replica_that_does_not_end_in_time_is_cancelled(harness: Any) -> None:
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick(STOP_GRACE_S - 1)
    assert harness.executor.cancelled == []
    assert harness.tick(2).state == "stopping"
    assert sorted(harness.executor.cancelled) == sorted(harness.executor.jobs)
    end_all(harness, Cause.CANCELLED, -15)
    run = harness.tick()
    assert run.state == "cancelled"
    assert run.state_reason == "stopped by olga; no final weights were written"
    assert states(harness) == ["evicted", "evicted"]
    harness.tick()
    assert harness.executor.launches == 2


def test_a_stop_that_loses_a_race_is_retried(harness: Any) -> None:
    stale = Run.objects.get(pk=harness.run.pk)
    Run.objects.filter(pk=harness.run.pk).update(state="degraded")
    assert replicas_and_pools.request_stop(stale, actor=harness.run.owner)
    assert stale.state == "stopping"
    Run.objects.filter(pk=harness.run.pk).update(state="running")
    stale = Run.objects.get(pk=harness.run.pk)
    Run.objects.filter(pk=harness.run.pk).update(state="succeeded")
    assert not replicas_and_pools.request_stop(stale, actor=harness.run.owner)
    assert stale.state == "succeeded"


def test_the_time_limit_stops_the_run(make_harness: MakeHarness) -> None:
    harness = make_harness(time_limit_s=100)
    harness.start()
    harness.beat_all()
    assert harness.tick(100).state == "running"
    harness.beat_all()
    assert harness.tick(1).state == "stopping"
    assert harness.run.state_reason == "time limit of 100 s reached"
    harness.tick()
    assert [c.command for c in commands(harness)] == ["stop"]
    assert harness.run.events.get(to_state="stopping").actor is None


def test_an_ended_run_evicts_replicas_that_never_started(make_harness: MakeHarness) -> None:
    harness = make_harness(replicas=3)
    harness.run.replicas.filter(number=2).update(state="restarting")
    harness.replica(2).attempts.update(ended_at=harness.clock(), cause="lost")
    harness.beat_all("done", but=(2,))
    harness.bucket.final(1)
    harness.tick()
    assert harness.tick().state == "succeeded"
    assert states(harness) == ["done", "done", "evicted"]
    assert harness.replica(2).state_reason == "the run has ended"


def test_remaining_jobs_are_cancelled_after_the_grace_period(harness: Any) -> None:
    harness.bucket.final(1)
    assert harness.tick().state == "succeeded"
    harness.tick(STOP_GRACE_S - 2)
    assert harness.executor.cancelled == []
    harness.tick(4)
    assert sorted(harness.executor.cancelled) == sorted(harness.executor.jobs)
    assert list(runs_to_reconcile()) == [harness.run]


def test_a_run_is_processed_until_its_last_segment_is_read(harness: Any) -> None:
    assert list(runs_to_reconcile()) == [harness.run]
    harness.bucket.segment(0, 1, losses=[5.0])
    harness.bucket.final(1)
    harness.beat_all("done")
    harness.tick()
    end_all(harness, Cause.DONE)
    harness.bucket.segment(0, 2, losses=[4.0], first=2)
    harness.control()
    harness.ingest()
    harness.control()
    assert harness.run.state == "succeeded"
    assert list(runs_to_reconcile()) == [harness.run]  # there can be a third segment
    harness.tick()
    harness.tick()
    assert list(runs_to_reconcile()) == []
    assert harness.replica(0).loss == 4.5


def test_an_ended_run_is_processed_for_a_limited_time(harness: Any) -> None:
    Run.objects.filter(pk=harness.run.pk).update(state="succeeded", ended_at=harness.clock())
    harness.run.replicas.update(state="done")
    for number in (0, 1):
        harness.replica(number).attempts.update(ended_at=harness.clock())
    assert list(runs_to_reconcile()) == [harness.run]  # cursors are open
    harness.clock.pass_s(DRAIN_FOR.total_seconds() + 1)
    assert list(runs_to_reconcile()) == []
    # After a day without a server there is so much to read that ingest still continues.
    Run.objects.update(last_seen_at=harness.clock())
    assert list(runs_to_reconcile()) == [harness.run]
    harness.clock.pass_s(DRAIN_FOR.total_seconds() + 1)
    assert list(runs_to_reconcile()) == []


def test_a_replica_stopped_by_an_operator_does_not_return(harness: Any) -> None:
    replica = harness.replica(1)
    assert replicas_and_pools.stop_replica(replica, actor=harness.run.owner)
    assert not replicas_and_pools.stop_replica(harness.replica(1), actor=harness.run.owner)
    harness.beat_all()
    harness.tick()
    assert harness.executor.cancelled == []  # drained, with time left
    harness.executor.end(harness.key(1), Cause.DONE, code=0)
    harness.beat_all(but=(1,))
    run = harness.tick()
    assert (run.state, states(harness)) == ("degraded", ["computing", "evicted"])
    harness.beat_all(but=(1,))
    harness.tick(120)
    harness.work()
    assert harness.executor.launches == 2


def test_a_replica_restarted_by_an_operator_keeps_its_number(harness: Any) -> None:
    assert replicas_and_pools.restart_replica(harness.replica(1), actor=harness.run.owner)
    harness.outbox.clear()
    harness.tick()
    assert harness.executor.cancelled == []
    assert harness.outbox == []  # the old job has not ended
    harness.executor.end(harness.key(1), Cause.CANCELLED, code=-15)
    harness.tick()
    harness.work()
    assert harness.replica(1).attempts.count() == 2
    harness.bucket.beat(1, 1, "syncing", seq=2)
    harness.tick()
    replica = harness.replica(1)
    assert (replica.state, replica.restarts) == ("syncing", 0)  # requested, so not counted


def test_an_ended_run_restarts_no_replica(harness: Any) -> None:
    Run.objects.filter(pk=harness.run.pk).update(state="succeeded")
    with pytest.raises(IllegalTransition, match="of a run that is succeeded"):
        replicas_and_pools.restart_replica(harness.replica(1), actor=harness.run.owner)


def test_stopping_the_last_replica_ends_the_run(harness: Any) -> None:
    for number in (0, 1):
        replicas_and_pools.stop_replica(harness.replica(number), actor=harness.run.owner)
    end_all(harness, Cause.DONE)
    run = harness.tick()
    assert (run.state, states(harness)) == ("failed", ["evicted", "evicted"])


def look_after(run: Run, clock: Any) -> None:
    """Ticks until the run needs none."""
    for _ in range(5):
        if run not in runs_to_reconcile():
            return
        clock.pass_s(1)
        reconcile_run(str(run.pk))
    raise AssertionError(f"{run} is looked after for ever")


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
    look_after(run, clock)
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
    look_after(run, clock)
    assert set(run.replicas.values_list("state", flat=True)) == {"evicted"}
    assert not run.events.filter(kind="store").exists()


def test_a_stopped_run_waits_for_an_unreachable_backend_for_a_limited_time(harness: Any) -> None:
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    harness.executor.away = "401 the token was revoked"
    harness.tick(GIVE_UP_AFTER.total_seconds() - 60)
    assert harness.run.state == "stopping"
    harness.tick(120)
    harness.tick()
    run = harness.tick()
    assert run.state == "cancelled"
    assert set(states(harness)) <= {"lost", "evicted"}
    attempt = harness.replica(0).attempts.get()
    assert (attempt.cause, attempt.message[:8]) == ("lost", "given up")
    harness.tick(60)
    harness.work()
    assert harness.executor.launches == 2


def test_the_last_heartbeat_is_read_after_the_end_of_the_run(harness: Any) -> None:
    """All telemetry was read, and the process ends between two passes."""
    harness.bucket.final(1)
    harness.beat_all("uploading")
    harness.tick()
    harness.beat_all("done")
    end_all(harness, Cause.DONE)
    TelemetryCursor.objects.update(ended=True)

    def control() -> None:
        for _ in range(3):
            harness.control()
            write_run(str(harness.run.pk))

    control()
    assert list(runs_to_reconcile()) == [harness.run]
    harness.ingest()
    control()
    assert list(runs_to_reconcile()) == []
    assert {replica.beat_state for replica in harness.run.replicas.all()} == {"done"}
