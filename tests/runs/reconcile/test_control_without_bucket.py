"""Control needs the database and the backends: whatever a bucket holds or does, it acts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import Command
from diloco.store.base import LocalStore, StoreDenied, StoreUnavailable
from executors.base import Cause, JobState, ReplicaStatus
from runs.actions import lifecycle, replicas_and_pools
from runs.backends import parallel_calls
from runs.ingest import ingest_pass
from runs.models import Alert, IngestState, Journal, QuarantinedRecord
from runs.queries.selectors import runs_to_look_after
from runs.reconcile import jobs
from runs.reconcile.context import PROGRESS_UNKNOWN_AFTER, WAIT_FOR_BUCKET
from runs.submit.run_draft import PoolDraft
from tests.runs.world import incarnation

pytestmark = pytest.mark.django_db
MakeWorld = Callable[..., Any]
LONG_S = PROGRESS_UNKNOWN_AFTER.total_seconds() + 1


@pytest.fixture
def world(make_world: MakeWorld) -> Any:
    made = make_world(replicas=2)
    made.start()
    return made


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the store's methods that were called."""
    called: list[str] = []

    def note(name: str) -> Callable[..., Any]:
        def method(self: LocalStore, *args: Any, **more: Any) -> Any:
            called.append(name)
            raise AssertionError(f"control called {name} of the store")

        return method

    for name in ("get", "get_range", "list", "put", "create", "delete"):
        monkeypatch.setattr(LocalStore, name, note(name))
    return called


def bucket_raises(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    for name in ("list", "create"):
        monkeypatch.setattr(LocalStore, name, refuse)


def hostile_segments(world: Any) -> None:
    huge = world.bucket.report(1, phases={"compute": 1e308})
    world.bucket.segment(0, 1, rounds=(huge, huge))
    many = tuple(world.bucket.report(n, bytes_up=2**53) for n in range(1, 1101))
    world.bucket.segment(1, 1, rounds=many)


def test_control_asks_the_store_nothing(world: Any, untouched: list[str]) -> None:
    lifecycle.force_stop(world.run, actor=world.run.owner)
    world.control()
    assert sorted(world.executor.cancelled) == sorted(world.executor.jobs)
    for key in world.executor.jobs:
        world.executor.end(key, Cause.CANCELLED, code=-15)
    world.control()
    assert untouched == []


def test_a_forced_stop_ends_the_jobs_of_a_run_whose_ingest_never_works(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OverflowError("cannot convert float infinity to integer")

    for name in ("ingest_rounds", "ingest_telemetry", "read_leases", "read_final"):
        monkeypatch.setattr(ingest_pass, name, broken)
    lifecycle.force_stop(world.run, actor=world.run.owner)
    world.tick()
    assert sorted(world.executor.cancelled) == sorted(world.executor.jobs)
    for key in world.executor.jobs:
        world.executor.end(key, Cause.CANCELLED, code=-15)
    world.tick()
    assert world.tick(WAIT_FOR_BUCKET.total_seconds() + 1).state == "cancelled"


def test_hostile_segments_stop_neither_control_nor_the_other_records(world: Any) -> None:
    hostile_segments(world)
    for replica in (0, 1):
        world.bucket.segment(replica, 2, losses=[5.0])
    world.bucket.commit(1, [0, 1])
    for _ in range(5):
        world.beat_all()
        world.tick()
    assert (world.run.state, world.run.committed_rounds) == ("running", 1)
    assert [world.replica(n).loss for n in (0, 1)] == [5.0, 5.0]
    lifecycle.force_stop(world.run, actor=world.run.owner)
    world.tick()
    assert sorted(world.executor.cancelled) == sorted(world.executor.jobs)


def test_a_step_that_fails_is_reported_and_the_others_run(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tick: Any) -> None:
        raise ZeroDivisionError("no price")

    broken.__name__ = "add_up"
    for name in (
        "replicas.relaunch",
        "billing.add_up",
        "replicas.judge_replicas",
        "draining.release",
    ):
        monkeypatch.setattr(f"runs.reconcile.{name}", broken)
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    lifecycle.force_stop(world.run, actor=world.run.owner)
    for _ in range(2):
        world.tick()
    assert world.executor.cancelled
    [event] = world.events("control")
    assert event == "control: add up failed: ZeroDivisionError: no price"


@pytest.mark.parametrize("limit", ["time", "budget"])
def test_limits_hold_while_the_bucket_is_away(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    limits: dict[str, Any] = {"time_limit_s": 100} if limit == "time" else {"budget_usd": 1.0}
    world = make_world(replicas=1, pools=(PoolDraft(count=1, price_usd_h=36.0),), **limits)
    world.start()
    bucket_raises(monkeypatch, StoreUnavailable("503"))
    assert world.tick(50).state in ("running", "degraded")
    assert world.tick(60).state == "stopping"
    assert limit in world.run.state_reason


def test_a_run_whose_bucket_is_away_does_not_look_healthy(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        bucket_raises(patch, StoreUnavailable("no route to bucket"))
        world.tick()
        since = world.clock()
        run = world.tick(LONG_S)
        assert run.state == "degraded"
        assert run.state_reason.startswith(
            f"progress is unknown since {since:%Y-%m-%d %H:%M:%S} UTC: the rendezvous cannot be "
        )
        assert "no route to bucket" in run.state_reason
        [alert] = Alert.objects.filter(run=run, closed_at=None)
        assert (alert.kind, alert.level) == ("bucket", "error")
        # Nobody looked, so nobody was silent.
        assert set(run.replicas.values_list("state", flat=True)) == {"computing"}
    world.beat_all()
    assert world.tick().state == "running"
    assert not Alert.objects.filter(run=world.run, closed_at=None).exists()


def test_the_end_of_a_run_does_not_wait_for_a_bucket_for_ever(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket_raises(monkeypatch, StoreUnavailable("503"))
    for key in world.executor.jobs:
        world.executor.end(key, Cause.DONE, code=0)
    world.tick()
    assert world.tick(60).state not in ("failed", "succeeded")
    run = world.tick(WAIT_FOR_BUCKET.total_seconds())
    assert run.state == "failed"
    assert "progress is unknown since" in run.state_reason
    assert world.executor.launches == 2, "no replica of a run that may be complete is relaunched"


def test_the_end_waits_for_a_pass_that_began_after_the_last_job(world: Any) -> None:
    """What the last job wrote must be read before its run is judged."""
    world.bucket.final(1)
    for key in world.executor.jobs:
        world.executor.end(key, Cause.DONE, code=0)
    for _ in range(3):
        assert world.control().state == "running"
    world.ingest()
    assert world.control().state == "succeeded"


def test_a_jump_of_the_clock_makes_no_replica_silent(world: Any) -> None:
    world.beat_all()
    world.tick()
    world.clock.pass_s(3600)
    world.beat_all()
    world.ingest()
    world.control(0)
    assert world.run.state == "running"
    world.clock.pass_s(-7200)
    for _ in range(3):
        world.beat_all()
        assert world.tick().state == "running"


# Backends.


def test_an_account_that_hangs_delays_no_other(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    world = make_world(replicas=1)
    world.start()
    never = threading.Event()
    monkeypatch.setattr(parallel_calls, "PATIENCE_S", 0.1)
    monkeypatch.setattr(world.executor, "poll", lambda handles: never.wait() or [])
    world.beat_all()
    run = world.tick()
    never.set()
    assert run.state == "running"  # unknown is not lost
    assert world.replica(0).state == "computing"


def test_an_answer_that_is_no_executor_error_is_one_accounts_trouble(world: Any) -> None:
    world.executor.poll = lambda handles: [][1]
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    assert world.tick().state == "stopping"
    assert not world.run.replicas.filter(state="lost").exists()


def test_accounts_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jobs.HANGING_PATIENCE_S < parallel_calls.PATIENCE_S < 10.0


def test_a_run_that_ends_while_its_bucket_denies_what_it_permitted_before_waits_for_it(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy, a credential or a clock that is wrong for a while."""
    world.tick(1)
    world.bucket.final(1)
    with monkeypatch.context() as patch:
        bucket_raises(patch, StoreDenied("403 RequestTimeTooSkewed"))
        for key in world.executor.jobs:
            world.executor.end(key, Cause.DONE, code=0)
        for _ in range(5):
            world.tick(30)
        assert world.run.state not in ("failed", "succeeded")
    for _ in range(3):
        world.tick(30)
    assert world.run.state == "succeeded"
    assert {replica.state for replica in world.run.replicas.all()} == {"done"}


def test_a_bucket_that_was_never_permitted_to_be_read_does_not_delay_the_end_of_a_run(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(replicas=2)
    bucket_raises(monkeypatch, StoreDenied("403 AccessDenied"))
    world.tick(1)
    for key in world.executor.jobs:
        world.executor.end(key, Cause.ERROR, code=78)
    for _ in range(5):
        world.tick(30)
    assert world.run.state == "failed"


# The journal.


@pytest.mark.parametrize("error", [StoreDenied("403 AccessDenied"), StoreUnavailable("503")])
def test_a_journal_that_cannot_be_written_stays_due_until_it_is(
    world: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from runs.restore.journal_reader import read_journal

    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> bool:
            raise error

        patch.setattr(LocalStore, "create", refuse)
        world.bucket.final(1)
        for key in world.executor.jobs:
            world.executor.end(key, Cause.DONE, code=0)
        for _ in range(4):
            world.tick(30)
        assert world.run.state == "succeeded"
        assert any("the journal could not be written" in said for said in world.events("store"))
        journal = Journal.objects.get(run=world.run)
        assert journal.due
        assert journal.failures >= 2
        world.clock.pass_s(3 * 3600)
        assert list(runs_to_look_after()) == [world.run], "as long as it is due"
    for _ in range(2):
        world.tick(600)
    assert read_journal(world.bucket.store).run["state"] == "succeeded"
    assert not Journal.objects.get(run=world.run).due
    assert list(runs_to_look_after()) == []


# Quarantine.


def poison(monkeypatch: pytest.MonkeyPatch, message: str, error: BaseException) -> None:
    """Storing a segment with that log line raises."""
    from runs.ingest import telemetry

    real = telemetry.store_segments

    def store(run: Any, found: Any, **more: Any) -> None:
        for _, segments in found:
            if any(line.message == message for s in segments for line in s.logs):
                raise error
        real(run, found, **more)

    monkeypatch.setattr(telemetry, "store_segments", store)


def test_a_segment_that_fails_three_times_is_skipped_kept_and_reported(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, "poison", OverflowError("integer out of range"))
    world.bucket.segment(0, 1, losses=[5.0])
    world.bucket.segment(0, 2, logs=(world.bucket.log("poison"),))
    world.bucket.segment(0, 3, losses=[4.0], first=2)
    world.bucket.segment(1, 1, losses=[3.0])
    world.beat_all()
    world.tick()
    assert [world.replica(n).loss for n in (0, 1)] == [5.0, 3.0], "only its own successors wait"
    for _ in range(3):
        world.beat_all()
        world.tick()
    assert world.replica(0).loss == 4.5
    [row] = QuarantinedRecord.objects.filter(run=world.run)
    assert row.key == keys.telemetry(0, incarnation(0), 2)
    assert (row.replica, row.incarnation, row.failures) == (world.replica(0), incarnation(0), 3)
    assert row.reason == "OverflowError: integer out of range"
    assert row.quarantined_at is not None
    [event] = world.events("quarantined")
    assert f"{row.key}" in event
    assert "quarantined after 3 failures" in event
    [alert] = Alert.objects.filter(run=world.run, kind="quarantined")
    assert "1 record could not be processed" in alert.message


class Killed(BaseException):
    """What a SIGKILL looks like to the code: no handler runs."""


def test_a_segment_that_has_the_process_killed_is_quarantined(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runs.ingest import telemetry

    real = telemetry.parse_segment

    def parse(data: bytes, *of: Any) -> Any:
        if b"poison" in data:
            raise Killed
        return real(data, *of)

    monkeypatch.setattr(telemetry, "parse_segment", parse)
    world.bucket.segment(0, 1, logs=(world.bucket.log("poison"),))
    world.bucket.segment(0, 2, losses=[4.0])
    world.bucket.segment(1, 1, losses=[3.0])
    kills = 0
    for _ in range(8):
        world.beat_all()
        try:
            world.tick()
        except Killed:
            kills += 1
            assert IngestState.objects.get(run=world.run).reading
        if kills == 3:
            assert world.replica(1).loss == 3.0, "other replicas do not wait"
    assert 3 <= kills <= 5
    assert (world.replica(0).loss, world.replica(1).loss) == (4.0, 3.0)
    [row] = QuarantinedRecord.objects.filter(run=world.run)
    assert (row.key, row.failures) == (keys.telemetry(0, incarnation(0), 1), 3)
    assert "the ingest process ended" in row.reason
    state = IngestState.objects.get(run=world.run)
    assert (state.reading, state.careful) == (False, False)


def test_a_round_that_fails_three_times_holds_nothing_back(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runs.ingest import rounds

    real = rounds._store_outcomes

    def store(row: Any, *rest: Any) -> None:
        if row.number == 2 and rest[0] is not None:
            raise OverflowError("out of range")
        real(row, *rest)

    monkeypatch.setattr(rounds, "_store_outcomes", store)
    for number in (1, 2, 3):
        world.bucket.commit(number, [0, 1])
    for _ in range(5):
        world.beat_all()
        world.tick()
    states = list(world.run.rounds.order_by("number").values_list("state", flat=True))
    assert states == ["committed", "void", "committed"]
    assert QuarantinedRecord.objects.filter(run=world.run, quarantined_at=None).count() == 0
    assert world.events("quarantined")


def test_an_outage_of_the_store_is_no_failure_of_a_record(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    IngestState.objects.filter(run=world.run).update(reading=True)  # the last pass was killed
    world.bucket.commit(1, [0, 1])
    with monkeypatch.context() as patch:

        def away(*_: Any, **__: Any) -> bytes:
            raise StoreUnavailable("503")

        patch.setattr(LocalStore, "get", away)
        for _ in range(5):
            world.tick()
    assert not QuarantinedRecord.objects.filter(quarantined_at__isnull=False).exists()
    world.beat_all()
    assert world.tick().committed_rounds == 1


# Pools.


def test_a_pool_that_needs_a_person_is_an_alert(world: Any) -> None:
    from runs.backends import circuit_breaker

    pool = world.run.pools.get()
    circuit_breaker.call_person(pool, "ResourceLimitExceeded: quota of 0")
    world.beat_all()
    world.tick()
    [alert] = Alert.objects.filter(run=world.run, closed_at=None)
    assert (alert.kind, alert.level, alert.subject) == ("pool", "error", f"pool {pool.pk}")
    assert "ResourceLimitExceeded: quota of 0" in alert.message
    circuit_breaker.person_looked(pool)
    world.beat_all()
    world.tick()
    assert not Alert.objects.filter(run=world.run, closed_at=None).exists()


def test_a_job_that_waits_is_polled(world: Any) -> None:
    world.executor.jobs[world.key()] = ReplicaStatus(state=JobState.PENDING)
    world.tick()
    assert world.replica(0).backend_state == "pending"


def test_what_is_to_be_written_is_enqueued_also_when_the_pages_cannot_be_sent_a_change(
    make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a value that JSON does not have would keep a stop from the replicas."""
    world = make_world(replicas=2, total_rounds=70)
    world.start()

    def fail(*args: Any) -> bool:
        raise ValueError("Out of range float values are not JSON compliant")

    monkeypatch.setattr("runs.reconcile.reconciler.publish_changes", fail)
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.outbox.clear()
    world.control()
    assert ("write_bucket", str(world.run.pk)) in world.outbox
    assert any("publish failed" in message for message in world.events("control"))


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "file in place of the folder"])
def test_an_odd_object_in_place_of_a_command_does_not_block_a_soft_stop(
    world: Any, kind: str
) -> None:
    root = world.bucket.store.inner.root
    path = root / keys.control(world.run.next_command)
    if kind == "file in place of the folder":
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.write_bytes(b"")
    else:
        path.parent.mkdir(exist_ok=True)
        make = {"fifo": os.mkfifo, "folder": os.mkdir, "link": lambda p: os.symlink("/dev/zero", p)}
        make[kind](path)
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    assert world.run.stop_sent_at is not None
    written = Command.read(world.bucket.store, keys.control(world.run.next_command - 1))
    assert written.command == "stop"


def test_an_odd_object_in_place_of_a_segment_is_passed(world: Any) -> None:
    path = world.bucket.store.inner.root / keys.telemetry(0, incarnation(0), 1)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    os.mkfifo(path.parent.parent / "fifo")
    world.bucket.segment(0, 2, losses=[5.0])
    commit = world.bucket.store.inner.root / keys.commit(1)
    commit.parent.mkdir(parents=True)
    os.mkfifo(commit)
    world.tick()
    assert world.replica(0).loss == 5.0
    assert IngestState.objects.get(run=world.run).trouble == ""
    assert len(world.events("refused")) == 2
