"""Killed ticks, launches that never happened, unavailable buckets: every wait is limited, and no
decision is based on missing observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import Command
from diloco.store.base import StoreDenied, StoreUnavailable
from executors.base import Cause
from runs.actions import replicas_and_pools
from runs.exceptions import LaunchLater
from runs.ingest.validation import REFUSAL_EVENTS
from runs.models import Run
from runs.queries.selectors import points
from runs.reconcile.context import WAIT_FOR_BUCKET
from runs.reconcile.jobs import UNLAUNCHED_AFTER
from runs.reconcile.launch import launch_replica, launch_run
from runs.reconcile.reconciler import reconcile_run

pytestmark = pytest.mark.django_db
MakeHarness = Callable[..., Any]


class Killed(BaseException):
    """Simulates SIGKILL: nothing catches it."""


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


@pytest.fixture
def half_launched(make_run: Any, clock: Any, executor: Any, outbox: Any) -> Any:
    """A run whose launch keys are stored, but whose backend was unavailable at the launch."""
    run = make_run(replicas=2)
    launch_run(str(run.pk))
    executor.away = "no answer"
    for replica in run.replicas.all():
        with pytest.raises(LaunchLater):
            launch_replica(replica.pk)
    executor.away = ""
    run.refresh_from_db()
    return run


def states(run: Any) -> list[str]:
    return list(run.replicas.order_by("number").values_list("state", flat=True))


def fail_bucket_reads(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr("runs.ingest.ingest_pass._Pass.read", refuse)


def test_the_next_tick_processes_an_end_that_a_killed_tick_missed(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.executor.end(harness.key(1), Cause.ERROR, code=1, message="boom")

    def die(_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("runs.reconcile.replicas.update_replicas", die)
        with pytest.raises(Killed):
            harness.tick()
    assert harness.replica(1).attempts.get().ended_at is not None
    assert states(harness.run) == ["computing", "computing"]
    harness.beat_all(but=(1,))
    harness.tick()
    assert states(harness.run) == ["computing", "restarting"]
    assert "boom" in harness.replica(1).state_reason


def test_a_clean_exit_waits_for_the_bucket(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.bucket.final(1)
    for key in harness.executor.jobs:
        harness.executor.end(key, Cause.DONE, code=0)
    with monkeypatch.context() as patch:
        fail_bucket_reads(patch, StoreUnavailable("503"))
        assert harness.tick().state == "running"
    assert states(harness.run) == ["computing", "computing"]
    assert harness.tick().state == "succeeded"
    assert states(harness.run) == ["done", "done"]


def test_a_stop_waits_for_the_result_in_a_bucket_that_is_away(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    harness.bucket.final(1, "stopped")
    for key in harness.executor.jobs:
        harness.executor.end(key, Cause.DONE, code=0)
    with monkeypatch.context() as patch:
        fail_bucket_reads(patch, StoreUnavailable("503"))
        assert harness.tick(60).state == "stopping"
    run = harness.tick()
    assert (run.state, run.state_reason) == ("cancelled", "stopped by olga at round 1")


@pytest.mark.parametrize(
    ("error", "waits_s"),
    [(StoreUnavailable("503"), WAIT_FOR_BUCKET.total_seconds()), (StoreDenied("gone"), 0.0)],
)
def test_a_stop_waits_for_a_limited_time(
    harness: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, waits_s: float
) -> None:
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    for key in harness.executor.jobs:
        harness.executor.end(key, Cause.DONE, code=0)
    fail_bucket_reads(monkeypatch, error)
    if waits_s:
        assert harness.tick(waits_s - 5).state == "stopping"
    assert harness.tick(10).state == "cancelled"


def test_a_launch_that_never_happened_does_not_delay_a_stop(
    half_launched: Any, clock: Any, executor: Any
) -> None:
    run = half_launched
    replicas_and_pools.request_stop(run, actor=run.owner)
    for after_s, expected in ((UNLAUNCHED_AFTER.total_seconds(), "stopping"), (1, "cancelled")):
        clock.pass_s(after_s)
        reconcile_run(str(run.pk))
        run.refresh_from_db()
        assert run.state == expected
    assert states(run) == ["evicted", "evicted"]
    for replica in run.replicas.all():
        launch_replica(replica.pk)  # the message is delivered again
    assert executor.launches == 0


def test_an_unreachable_backend_cancels_no_launch(
    half_launched: Any, clock: Any, executor: Any
) -> None:
    run = half_launched
    replicas_and_pools.request_stop(run, actor=run.owner)
    executor.away = "no answer"  # it can have a job of ours
    clock.pass_s(600)
    reconcile_run(str(run.pk))
    run.refresh_from_db()
    assert run.state == "stopping"


def test_a_replica_can_leave_before_it_was_launched(
    half_launched: Any, clock: Any, executor: Any
) -> None:
    run = half_launched
    replicas_and_pools.stop_replica(run.replicas.get(number=0), actor=run.owner)
    replicas_and_pools.restart_replica(run.replicas.get(number=1), actor=run.owner)
    clock.pass_s(UNLAUNCHED_AFTER.total_seconds() + 1)
    reconcile_run(str(run.pk))
    assert states(run) == ["evicted", "restarting"]
    launch_replica(run.replicas.get(number=1).pk)
    assert states(run) == ["evicted", "provisioning"]
    assert list(executor.jobs) == [run.replicas.get(number=1).attempts.get(number=2).launch_key]


def test_a_launch_that_succeeds_after_its_cancellation_is_cancelled(
    half_launched: Any, clock: Any, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = half_launched
    replica = run.replicas.get(number=0)
    launch = executor.ensure

    def slowly(*args: Any, **more: Any) -> Any:
        replicas_and_pools.stop_replica(replica, actor=run.owner)
        clock.pass_s(UNLAUNCHED_AFTER.total_seconds() + 1)
        reconcile_run(str(run.pk))
        return launch(*args, **more)

    monkeypatch.setattr(executor, "ensure", slowly)
    launch_replica(replica.pk)
    assert executor.cancelled == list(executor.jobs) == [replica.attempts.get().launch_key]


def test_an_unreadable_command_does_not_prevent_a_stop(harness: Any) -> None:
    store = harness.bucket.store
    store.create(keys.control(1), b"garbage")
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert Command.from_bytes(store.get(keys.control(2))).command == "stop"
    assert len(harness.events("refused")) == 1


def test_an_evaluation_read_before_its_commit_is_dated_by_it(harness: Any) -> None:
    harness.bucket.segment(0, 1, evaluations=(harness.bucket.evaluation(1, 4.0),))
    harness.beat_all()
    harness.tick()
    assert harness.run.rounds.get(number=1).eval_loss == 4.0
    harness.bucket.commit(1, [0, 1])
    harness.beat_all()
    harness.tick()
    row = harness.run.rounds.get(number=1)
    assert (row.state, row.eval_loss) == ("committed", 4.0)
    assert points(harness.run, "eval_loss")["tokens"] == [row.tokens_total]


def test_refused_records_are_counted_once(harness: Any) -> None:
    for number in range(REFUSAL_EVENTS + 10):
        harness.bucket.store.put(keys.checkpoint_manifest(number), b"{}")
    for last in (REFUSAL_EVENTS + 10, REFUSAL_EVENTS + 11):
        for number in range(1, last + 1):
            harness.bucket.commit(number, [0, 1])
        harness.beat_all()
        harness.tick()
        assert Run.objects.get().refused_records == REFUSAL_EVENTS
