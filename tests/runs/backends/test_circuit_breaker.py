"""The circuit breaker opens after repeated failures, or until an operator acts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from executors.base import AccountError, Cause, NoCapacity, RetryLater
from runs.actions import replicas_and_pools
from runs.backends import circuit_breaker
from runs.exceptions import LaunchLater
from runs.reconcile.launch import launch_replica
from runs.reconcile.reconciler import reconcile_run
from runs.submit.run_draft import PoolDraft
from tests.runs.launching import MakeRun, launched

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def waiting(share_harness: Callable[..., Any]) -> Any:
    return share_harness(lambda harness: None, replicas=6, max_restarts=100)


@pytest.fixture
def harness(waiting: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(waiting)


def pool(harness: Any) -> Any:
    return harness.run.pools.get()


def fail(harness: Any, *numbers: int) -> None:
    for number in numbers:
        attempt = harness.replica(number).attempts.latest("number")
        harness.executor.end(attempt.launch_key, Cause.ERROR, code=1, message="image not found")
    harness.tick()


def settle(harness: Any, *after_s: float) -> None:
    for seconds in after_s:
        harness.tick(seconds)
        harness.work()


def test_jobs_that_die_before_training_open_the_breaker(harness: Any) -> None:
    fail(harness, 0, 1)
    assert (pool(harness).failures, pool(harness).open_until) == (2, None)
    fail(harness, 2)
    assert pool(harness).failures == circuit_breaker.FAILURES
    assert (pool(harness).open_until - harness.clock()).total_seconds() == circuit_breaker.OPEN_S
    [event] = harness.events("breaker")
    assert "3 failures in a row, nothing is launched for 30 s" in event
    assert "image not found" in event
    launches = harness.executor.launches
    settle(harness, 10, 10)
    assert harness.executor.launches == launches


def test_half_open_breaker_closes_once_a_replica_trains(harness: Any) -> None:
    harness.beat_all(but=(0, 1, 2))
    harness.tick()
    fail(harness, 0, 1, 2)
    launches = harness.executor.launches
    settle(harness, circuit_breaker.OPEN_S + 1, 1, 1)
    assert harness.executor.launches == launches + 1
    tried = harness.run.replicas.get(state="provisioning")
    harness.bucket.beat(tried.number, 1, "computing", seq=2)
    harness.tick()
    assert (pool(harness).failures, pool(harness).last_error) == (0, "")
    assert harness.events("breaker")[-1].endswith("works again")
    settle(harness, 5, 5, 5)
    assert harness.executor.launches == launches + 3


def test_breaker_is_open_for_longer_each_time(harness: Any) -> None:
    harness.beat_all(but=(0, 1, 2))
    harness.tick()
    fail(harness, 0, 1, 2)
    settle(harness, circuit_breaker.OPEN_S + 1)
    tried = harness.run.replicas.get(state="provisioning")
    fail(harness, tried.number)
    assert (
        pool(harness).open_until - harness.clock()
    ).total_seconds() == 2 * circuit_breaker.OPEN_S


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0), (2, 0), (3, 30), (4, 60), (8, 900), (1000, 900)]
)
def test_open_times(failures: int, seconds: float) -> None:
    assert circuit_breaker.open_for_s(failures) == seconds


def test_quota_needs_an_operator_and_launches_resume_afterwards(
    make_harness: Callable[..., Any],
) -> None:
    harness = make_harness(replicas=2)
    harness.start()
    harness.executor.end(harness.key(1), Cause.LOST)
    harness.beat_all(but=(1,))
    harness.tick()
    harness.executor.refuses = AccountError("quota of 8 GPUs exceeded")
    harness.beat_all(but=(1,))
    settle(harness, 60)
    assert pool(harness).requires_intervention
    assert pool(harness).last_error == "quota of 8 GPUs exceeded"
    assert harness.replica(1).state == "restarting"
    assert "quota of 8 GPUs exceeded" in harness.replica(1).state_reason
    attempts = harness.replica(1).attempts.count()
    for _ in range(3):
        harness.beat_all(but=(1,))
        settle(harness, 60)
    assert harness.replica(1).attempts.count() == attempts
    assert harness.run.state == "degraded"
    harness.executor.refuses = ""
    assert circuit_breaker.reset_for_credential("local", None) == 1
    harness.beat_all(but=(1,))
    settle(harness, 1)
    assert harness.replica(1).state == "provisioning"


def test_requested_restart_closes_the_breaker(harness: Any) -> None:
    fail(harness, 0, 1, 2)
    launches = harness.executor.launches
    replicas_and_pools.restart_replica(harness.replica(1), actor=harness.run.owner)
    settle(harness, 1)
    assert harness.executor.launches > launches


class Counted:
    """Number of calls to the backend."""

    def __init__(self, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        for name in ("find", "ensure"):
            monkeypatch.setattr(executor, name, self._counting(getattr(executor, name)))

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return real(*args, **kwargs)

        return call


@pytest.fixture
def delayed_launch(
    make_run: MakeRun, clock: Any, executor: Any, outbox: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """A started launch for which the backend requests a retry in two minutes."""
    run = launched(make_run(replicas=1, pools=(PoolDraft(count=1),)))
    executor.refuses = RetryLater("429: slow down", after_s=120.0)
    with pytest.raises(LaunchLater):
        launch_replica(run.replicas.get().pk)
    executor.refuses = ""
    outbox.clear()
    run.backend = Counted(executor, monkeypatch)
    return run


def test_started_launch_waits_for_the_requested_delay(
    delayed_launch: Any, executor: Any, clock: Any, outbox: Any
) -> None:
    run, pool = delayed_launch, delayed_launch.pools.get()
    assert (pool.open_until - clock()).total_seconds() == 120
    for _ in range(11):
        clock.pass_s(10)
        reconcile_run(str(run.pk))
        launch_replica(run.replicas.get().pk)  # a late task
    assert (run.backend.calls, executor.launches) == (0, 0)
    assert ("launch_pool", pool.pk) not in outbox
    [attempt] = run.replicas.get().attempts.all()
    assert (run.replicas.get().state, attempt.ended_at) == ("provisioning", None)
    clock.pass_s(11)
    reconcile_run(str(run.pk))
    assert ("launch_pool", pool.pk) in outbox
    launch_replica(run.replicas.get().pk)
    assert executor.launches == 1
    [again] = run.replicas.get().attempts.all()
    assert (again.pk, again.handle is not None) == (attempt.pk, True)


def test_end_of_a_run_does_not_wait_for_an_open_breaker(delayed_launch: Any, clock: Any) -> None:
    run = delayed_launch
    replicas_and_pools.request_stop(run, actor=run.owner)
    clock.pass_s(31)
    for _ in range(3):
        reconcile_run(str(run.pk))
    run.refresh_from_db()
    assert run.state == "cancelled"
    assert run.backend.calls > 0  # a job could have existed


def test_an_unclear_refusal_requires_intervention_after_its_attempts(
    make_run: MakeRun, executor: Any, clock: Any
) -> None:
    run = launched(make_run(replicas=1))
    executor.refuses = NoCapacity("Limit exceeded (code 7)", attempts=3)
    seen = []
    for _ in range(3):
        with contextlib.suppress(LaunchLater):
            launch_replica(run.replicas.get().pk)
        pool = run.pools.get()
        seen.append((pool.failures, pool.requires_intervention))
        clock.pass_s(1)
    assert seen == [(1, False), (2, False), (3, True)]
    assert pool.last_error == "Limit exceeded (code 7)"
    assert run.replicas.get().state == "restarting"
