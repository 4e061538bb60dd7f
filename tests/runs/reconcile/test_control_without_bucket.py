"""Control needs only the database and the backends: it acts regardless of the bucket."""

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
from runs.queries.selectors import runs_to_reconcile
from runs.reconcile import jobs
from runs.reconcile.context import PROGRESS_UNKNOWN_AFTER, WAIT_FOR_BUCKET
from runs.submit.run_draft import PoolDraft
from tests.matrix import matrix
from tests.runs.run_harness import incarnation

pytestmark = pytest.mark.django_db
MakeHarness = Callable[..., Any]
LONG_S = PROGRESS_UNKNOWN_AFTER.total_seconds() + 1


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


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


def hostile_segments(harness: Any) -> None:
    huge = harness.bucket.report(1, phases={"compute": 1e308})
    harness.bucket.segment(0, 1, rounds=(huge, huge))
    many = tuple(harness.bucket.report(n, bytes_up=2**53) for n in range(1, 1101))
    harness.bucket.segment(1, 1, rounds=many)


def test_control_makes_no_request_to_the_store(harness: Any, untouched: list[str]) -> None:
    lifecycle.force_stop(harness.run, actor=harness.run.owner)
    harness.control()
    assert sorted(harness.executor.cancelled) == sorted(harness.executor.jobs)
    for key in harness.executor.jobs:
        harness.executor.end(key, Cause.CANCELLED, code=-15)
    harness.control()
    assert untouched == []


def test_a_forced_stop_ends_the_jobs_of_a_run_whose_ingest_never_works(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OverflowError("cannot convert float infinity to integer")

    for name in ("ingest_rounds", "ingest_telemetry", "read_leases", "read_final"):
        monkeypatch.setattr(ingest_pass, name, broken)
    lifecycle.force_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert sorted(harness.executor.cancelled) == sorted(harness.executor.jobs)
    for key in harness.executor.jobs:
        harness.executor.end(key, Cause.CANCELLED, code=-15)
    harness.tick()
    assert harness.tick(WAIT_FOR_BUCKET.total_seconds() + 1).state == "cancelled"


def test_hostile_segments_stop_neither_control_nor_the_other_records(harness: Any) -> None:
    hostile_segments(harness)
    for replica in (0, 1):
        harness.bucket.segment(replica, 2, losses=[5.0])
    harness.bucket.commit(1, [0, 1])
    for _ in range(5):
        harness.beat_all()
        harness.tick()
    assert (harness.run.state, harness.run.committed_rounds) == ("running", 1)
    assert [harness.replica(n).loss for n in (0, 1)] == [5.0, 5.0]
    lifecycle.force_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert sorted(harness.executor.cancelled) == sorted(harness.executor.jobs)


def test_a_step_that_fails_is_reported_and_the_others_run(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tick: Any) -> None:
        raise ZeroDivisionError("no price")

    broken.__name__ = "add_up"
    for name in (
        "replicas.relaunch",
        "billing.add_up",
        "replicas.update_replicas",
        "draining.release",
    ):
        monkeypatch.setattr(f"runs.reconcile.{name}", broken)
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    lifecycle.force_stop(harness.run, actor=harness.run.owner)
    for _ in range(2):
        harness.tick()
    assert harness.executor.cancelled
    [event] = harness.events("control")
    assert event == "control: add up failed: ZeroDivisionError: no price"


@pytest.mark.parametrize("limit", ["time", "budget"])
def test_limits_hold_while_the_bucket_is_away(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    limits: dict[str, Any] = {"time_limit_s": 100} if limit == "time" else {"budget_usd": 1.0}
    harness = make_harness(replicas=1, pools=(PoolDraft(count=1, price_usd_h=36.0),), **limits)
    harness.start()
    bucket_raises(monkeypatch, StoreUnavailable("503"))
    assert harness.tick(50).state in ("running", "degraded")
    assert harness.tick(60).state == "stopping"
    assert limit in harness.run.state_reason


def test_a_run_with_an_unavailable_bucket_is_not_healthy(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        bucket_raises(patch, StoreUnavailable("no route to bucket"))
        harness.tick()
        since = harness.clock()
        run = harness.tick(LONG_S)
        assert run.state == "degraded"
        assert run.state_reason.startswith(
            f"progress is unknown since {since:%Y-%m-%d %H:%M:%S} UTC: the rendezvous cannot be "
        )
        assert "no route to bucket" in run.state_reason
        [alert] = Alert.objects.filter(run=run, closed_at=None)
        assert (alert.kind, alert.level) == ("bucket", "error")
        # No pass observed the replicas, so none counts as silent.
        assert set(run.replicas.values_list("state", flat=True)) == {"computing"}
    harness.beat_all()
    assert harness.tick().state == "running"
    assert not Alert.objects.filter(run=harness.run, closed_at=None).exists()


def test_the_end_of_a_run_waits_for_a_bucket_for_a_limited_time(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket_raises(monkeypatch, StoreUnavailable("503"))
    for key in harness.executor.jobs:
        harness.executor.end(key, Cause.DONE, code=0)
    harness.tick()
    assert harness.tick(60).state not in ("failed", "succeeded")
    run = harness.tick(WAIT_FOR_BUCKET.total_seconds())
    assert run.state == "failed"
    assert "progress is unknown since" in run.state_reason
    assert harness.executor.launches == 2, "no replica of a run that may be complete is relaunched"


def test_the_end_waits_for_a_pass_that_began_after_the_last_job(harness: Any) -> None:
    """The last job's records must be read before the run's end is decided."""
    harness.bucket.final(1)
    for key in harness.executor.jobs:
        harness.executor.end(key, Cause.DONE, code=0)
    for _ in range(3):
        assert harness.control().state == "running"
    harness.ingest()
    assert harness.control().state == "succeeded"


def test_a_jump_of_the_clock_makes_no_replica_silent(harness: Any) -> None:
    harness.beat_all()
    harness.tick()
    harness.clock.pass_s(3600)
    harness.beat_all()
    harness.ingest()
    harness.control(0)
    assert harness.run.state == "running"
    harness.clock.pass_s(-7200)
    for _ in range(3):
        harness.beat_all()
        assert harness.tick().state == "running"


# Backends.


def test_a_hanging_account_delays_no_other(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    harness = make_harness(replicas=1)
    harness.start()
    never = threading.Event()
    monkeypatch.setattr(parallel_calls, "PATIENCE_S", 0.1)
    monkeypatch.setattr(harness.executor, "poll", lambda handles: never.wait() or [])
    harness.beat_all()
    run = harness.tick()
    never.set()
    assert run.state == "running"  # unknown is not lost
    assert harness.replica(0).state == "computing"


def test_an_unexpected_exception_affects_one_account_only(harness: Any) -> None:
    harness.executor.poll = lambda handles: [][1]
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    assert harness.tick().state == "stopping"
    assert not harness.run.replicas.filter(state="lost").exists()


def test_accounts_are_polled_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jobs.HANGING_PATIENCE_S < parallel_calls.PATIENCE_S < 10.0


def test_a_run_that_ends_while_its_bucket_denies_access_waits(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy, a credential or a clock that is wrong for a while."""
    harness.tick(1)
    harness.bucket.final(1)
    with monkeypatch.context() as patch:
        bucket_raises(patch, StoreDenied("403 RequestTimeTooSkewed"))
        for key in harness.executor.jobs:
            harness.executor.end(key, Cause.DONE, code=0)
        for _ in range(5):
            harness.tick(30)
        assert harness.run.state not in ("failed", "succeeded")
    for _ in range(3):
        harness.tick(30)
    assert harness.run.state == "succeeded"
    assert {replica.state for replica in harness.run.replicas.all()} == {"done"}


def test_a_bucket_that_was_never_permitted_to_be_read_does_not_delay_the_end_of_a_run(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(replicas=2)
    bucket_raises(monkeypatch, StoreDenied("403 AccessDenied"))
    harness.tick(1)
    for key in harness.executor.jobs:
        harness.executor.end(key, Cause.ERROR, code=78)
    for _ in range(5):
        harness.tick(30)
    assert harness.run.state == "failed"


# The journal.


@matrix("error", [StoreDenied("403 AccessDenied"), StoreUnavailable("503")], fast=1)
def test_a_journal_that_cannot_be_written_stays_due_until_it_is(
    harness: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from runs.restore.journal_reader import read_journal

    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> bool:
            raise error

        patch.setattr(LocalStore, "create", refuse)
        harness.bucket.final(1)
        for key in harness.executor.jobs:
            harness.executor.end(key, Cause.DONE, code=0)
        for _ in range(4):
            harness.tick(30)
        assert harness.run.state == "succeeded"
        assert any("the journal could not be written" in event for event in harness.events("store"))
        journal = Journal.objects.get(run=harness.run)
        assert journal.due
        assert journal.failures >= 2
        harness.clock.pass_s(3 * 3600)
        assert list(runs_to_reconcile()) == [harness.run], "as long as it is due"
    for _ in range(2):
        harness.tick(600)
    assert read_journal(harness.bucket.store).run["state"] == "succeeded"
    assert not Journal.objects.get(run=harness.run).due
    assert list(runs_to_reconcile()) == []


# Quarantine.


def poison(monkeypatch: pytest.MonkeyPatch, message: str, error: BaseException) -> None:
    """Storing a segment with that log line raises."""
    from runs.ingest import segment_store

    real = segment_store.store_segments

    def store(run: Any, result: Any, **more: Any) -> None:
        for _, segments in result:
            if any(line.message == message for s in segments for line in s.logs):
                raise error
        real(run, result, **more)

    monkeypatch.setattr(segment_store, "store_segments", store)


def test_a_segment_that_fails_three_times_is_skipped_kept_and_reported(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, "poison", OverflowError("integer out of range"))
    harness.bucket.segment(0, 1, losses=[5.0])
    harness.bucket.segment(0, 2, logs=(harness.bucket.log("poison"),))
    harness.bucket.segment(0, 3, losses=[4.0], first=2)
    harness.bucket.segment(1, 1, losses=[3.0])
    harness.beat_all()
    harness.tick()
    assert [harness.replica(n).loss for n in (0, 1)] == [5.0, 3.0], "only its own successors wait"
    for _ in range(3):
        harness.beat_all()
        harness.tick()
    assert harness.replica(0).loss == 4.5
    [row] = QuarantinedRecord.objects.filter(run=harness.run)
    assert row.key == keys.telemetry(0, incarnation(0), 2)
    assert (row.replica, row.incarnation, row.failures) == (harness.replica(0), incarnation(0), 3)
    assert row.reason == "OverflowError: integer out of range"
    assert row.quarantined_at is not None
    [event] = harness.events("quarantined")
    assert f"{row.key}" in event
    assert "quarantined after 3 failures" in event
    [alert] = Alert.objects.filter(run=harness.run, kind="quarantined")
    assert "1 record could not be processed" in alert.message


class Killed(BaseException):
    """Simulates SIGKILL: no handler runs."""


def test_a_segment_that_kills_the_process_is_quarantined(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runs.ingest import telemetry

    real = telemetry.parse_segment

    def parse(data: bytes, *of: Any) -> Any:
        if b"poison" in data:
            raise Killed
        return real(data, *of)

    monkeypatch.setattr(telemetry, "parse_segment", parse)
    harness.bucket.segment(0, 1, logs=(harness.bucket.log("poison"),))
    harness.bucket.segment(0, 2, losses=[4.0])
    harness.bucket.segment(1, 1, losses=[3.0])
    kills = 0
    for _ in range(8):
        harness.beat_all()
        try:
            harness.tick()
        except Killed:
            kills += 1
            assert IngestState.objects.get(run=harness.run).reading
        if kills == 3:
            assert harness.replica(1).loss == 3.0, "other replicas do not wait"
    assert 3 <= kills <= 5
    assert (harness.replica(0).loss, harness.replica(1).loss) == (4.0, 3.0)
    [row] = QuarantinedRecord.objects.filter(run=harness.run)
    assert (row.key, row.failures) == (keys.telemetry(0, incarnation(0), 1), 3)
    assert "the ingest process ended" in row.reason
    state = IngestState.objects.get(run=harness.run)
    assert (state.reading, state.careful) == (False, False)


def test_a_round_that_fails_three_times_blocks_nothing(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runs.ingest import rounds

    real = rounds._Rounds._store_outcomes

    def store(self: Any, row: Any, records: Any, **rest: Any) -> None:
        if row.number == 2 and records.commit is not None:
            raise OverflowError("out of range")
        real(self, row, records, **rest)

    monkeypatch.setattr(rounds._Rounds, "_store_outcomes", store)
    for number in (1, 2, 3):
        harness.bucket.commit(number, [0, 1])
    for _ in range(5):
        harness.beat_all()
        harness.tick()
    states = list(harness.run.rounds.order_by("number").values_list("state", flat=True))
    assert states == ["committed", "void", "committed"]
    assert QuarantinedRecord.objects.filter(run=harness.run, quarantined_at=None).count() == 0
    assert harness.events("quarantined")


def test_a_store_outage_is_not_a_failure_of_a_record(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    IngestState.objects.filter(run=harness.run).update(reading=True)  # the last pass was killed
    harness.bucket.commit(1, [0, 1])
    with monkeypatch.context() as patch:

        def away(*_: Any, **__: Any) -> bytes:
            raise StoreUnavailable("503")

        patch.setattr(LocalStore, "get", away)
        for _ in range(5):
            harness.tick()
    assert not QuarantinedRecord.objects.filter(quarantined_at__isnull=False).exists()
    harness.beat_all()
    assert harness.tick().committed_rounds == 1


# Pools.


def test_a_pool_that_requires_intervention_is_an_alert(harness: Any) -> None:
    from runs.backends import circuit_breaker

    pool = harness.run.pools.get()
    circuit_breaker.require_intervention(pool, "ResourceLimitExceeded: quota of 0")
    harness.beat_all()
    harness.tick()
    [alert] = Alert.objects.filter(run=harness.run, closed_at=None)
    assert (alert.kind, alert.level, alert.subject) == ("pool", "error", f"pool {pool.pk}")
    assert "ResourceLimitExceeded: quota of 0" in alert.message
    circuit_breaker.reset(pool)
    harness.beat_all()
    harness.tick()
    assert not Alert.objects.filter(run=harness.run, closed_at=None).exists()


def test_a_job_that_waits_is_polled(harness: Any) -> None:
    harness.executor.jobs[harness.key()] = ReplicaStatus(state=JobState.PENDING)
    harness.tick()
    assert harness.replica(0).backend_state == "pending"


def test_writes_are_enqueued_even_if_publishing_fails(
    make_harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a value that JSON does not have would keep a stop from the replicas."""
    harness = make_harness(replicas=2, total_rounds=70)
    harness.start()

    def fail(*args: Any) -> bool:
        raise ValueError("Out of range float values are not JSON compliant")

    monkeypatch.setattr("runs.reconcile.reconciler.publish_changes", fail)
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.outbox.clear()
    harness.control()
    assert ("write_bucket", str(harness.run.pk)) in harness.outbox
    assert any("publish failed" in message for message in harness.events("control"))


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "file in place of the folder"])
def test_a_foreign_object_in_place_of_a_command_does_not_block_a_stop(
    harness: Any, kind: str
) -> None:
    root = harness.bucket.store.inner.root
    path = root / keys.control(harness.run.next_command)
    if kind == "file in place of the folder":
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.write_bytes(b"")
    else:
        path.parent.mkdir(exist_ok=True)
        make = {"fifo": os.mkfifo, "folder": os.mkdir, "link": lambda p: os.symlink("/dev/zero", p)}
        make[kind](path)
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert harness.run.stop_sent_at is not None
    written = Command.read(harness.bucket.store, keys.control(harness.run.next_command - 1))
    assert written.command == "stop"


def test_a_foreign_object_in_place_of_a_segment_is_skipped(harness: Any) -> None:
    path = harness.bucket.store.inner.root / keys.telemetry(0, incarnation(0), 1)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    os.mkfifo(path.parent.parent / "fifo")
    harness.bucket.segment(0, 2, losses=[5.0])
    commit = harness.bucket.store.inner.root / keys.commit(1)
    commit.parent.mkdir(parents=True)
    os.mkfifo(commit)
    harness.tick()
    assert harness.replica(0).loss == 5.0
    assert IngestState.objects.get(run=harness.run).trouble == ""
    assert len(harness.events("refused")) == 2
