"""A backend that fails again and again is left alone; one that needs a person waits for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from executors.base import Cause, NeedsPerson, NoCapacity, RetryLater
from runs.actions import replicas_and_pools
from runs.backends import circuit_breaker
from runs.exceptions import LaunchLater
from runs.reconcile.launch import launch_replica
from runs.reconcile.reconciler import reconcile_run
from runs.submit.run_draft import PoolDraft
from tests.runs.launching import MakeRun, launched

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    return make_world(replicas=6, max_restarts=100)


def pool(world: Any) -> Any:
    return world.run.pools.get()


def fail(world: Any, *numbers: int) -> None:
    for number in numbers:
        attempt = world.replica(number).attempts.latest("number")
        world.executor.end(attempt.launch_key, Cause.ERROR, code=1, said="image not found")
    world.tick()


def settle(world: Any, *after_s: float) -> None:
    for seconds in after_s:
        world.tick(seconds)
        world.work()


def test_jobs_that_die_before_they_work_close_the_pool(world: Any) -> None:
    fail(world, 0, 1)
    assert (pool(world).failures, pool(world).closed_until) == (2, None)
    fail(world, 2)
    assert pool(world).failures == circuit_breaker.FAILURES
    assert (pool(world).closed_until - world.clock()).total_seconds() == circuit_breaker.CLOSED_S
    [event] = world.events("breaker")
    assert "3 failures in a row, nothing is launched for 30 s" in event
    assert "image not found" in event
    launches = world.executor.launches
    settle(world, 10, 10)
    assert world.executor.launches == launches


def test_then_one_is_tried_and_its_work_opens_it(world: Any) -> None:
    world.beat_all(but=(0, 1, 2))
    world.tick()
    fail(world, 0, 1, 2)
    launches = world.executor.launches
    settle(world, circuit_breaker.CLOSED_S + 1, 1, 1)
    assert world.executor.launches == launches + 1
    tried = world.run.replicas.get(state="provisioning")
    world.bucket.beat(tried.number, 1, "computing", seq=2)
    world.tick()
    assert (pool(world).failures, pool(world).trouble) == (0, "")
    assert world.events("breaker")[-1].endswith("works again")
    settle(world, 5, 5, 5)
    assert world.executor.launches == launches + 3


def test_it_stays_closed_for_longer_each_time(world: Any) -> None:
    world.beat_all(but=(0, 1, 2))
    world.tick()
    fail(world, 0, 1, 2)
    settle(world, circuit_breaker.CLOSED_S + 1)
    tried = world.run.replicas.get(state="provisioning")
    fail(world, tried.number)
    assert (
        pool(world).closed_until - world.clock()
    ).total_seconds() == 2 * circuit_breaker.CLOSED_S


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0), (2, 0), (3, 30), (4, 60), (8, 900), (1000, 900)]
)
def test_closing_times(failures: int, seconds: float) -> None:
    assert circuit_breaker.closed_for_s(failures) == seconds


def test_a_quota_waits_for_a_person_and_goes_on_by_itself_afterwards(
    make_world: Callable[..., Any],
) -> None:
    world = make_world(replicas=2)
    world.start()
    world.executor.end(world.key(1), Cause.LOST)
    world.beat_all(but=(1,))
    world.tick()
    world.executor.refuses = NeedsPerson("quota of 8 GPUs exceeded")
    world.beat_all(but=(1,))
    settle(world, 60)
    assert pool(world).needs_person
    assert pool(world).trouble == "quota of 8 GPUs exceeded"
    assert world.replica(1).state == "restarting"
    assert "quota of 8 GPUs exceeded" in world.replica(1).state_reason
    attempts = world.replica(1).attempts.count()
    for _ in range(3):
        world.beat_all(but=(1,))
        settle(world, 60)
    assert world.replica(1).attempts.count() == attempts
    assert world.run.state == "degraded"
    world.executor.refuses = ""
    assert circuit_breaker.person_acted("local", None) == 1
    world.beat_all(but=(1,))
    settle(world, 1)
    assert world.replica(1).state == "provisioning"


def test_a_restart_by_hand_is_tried_whatever_was(world: Any) -> None:
    fail(world, 0, 1, 2)
    launches = world.executor.launches
    replicas_and_pools.restart_replica(world.replica(1), actor=world.run.owner)
    settle(world, 1)
    assert world.executor.launches > launches


class Counted:
    """How often the backend was asked anything at all."""

    def __init__(self, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        for name in ("find", "ensure"):
            monkeypatch.setattr(executor, name, self._counting(getattr(executor, name)))

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return real(*args, **kwargs)

        return call


@pytest.fixture
def put_off(
    make_run: MakeRun, clock: Any, executor: Any, outbox: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """A launch that was begun and that its backend asked to try again in two minutes."""
    run = launched(make_run(replicas=1, pools=(PoolDraft(count=1),)))
    executor.refuses = RetryLater("429: slow down", after_s=120.0)
    with pytest.raises(LaunchLater):
        launch_replica(run.replicas.get().pk)
    executor.refuses = ""
    outbox.clear()
    run.backend = Counted(executor, monkeypatch)
    return run


def test_a_launch_that_was_begun_waits_as_its_backend_asked(
    put_off: Any, executor: Any, clock: Any, outbox: Any
) -> None:
    run, pool = put_off, put_off.pools.get()
    assert (pool.closed_until - clock()).total_seconds() == 120
    for _ in range(11):
        clock.pass_s(10)
        reconcile_run(str(run.pk))
        launch_replica(run.replicas.get().pk)  # a task that was delivered late
    assert (run.backend.asked, executor.launches) == (0, 0)
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


def test_the_end_of_a_run_does_not_wait_for_a_backend_that_is_left_alone(
    put_off: Any, clock: Any
) -> None:
    run = put_off
    replicas_and_pools.request_stop(run, actor=run.owner)
    clock.pass_s(31)
    for _ in range(3):
        reconcile_run(str(run.pk))
    run.refresh_from_db()
    assert run.state == "cancelled"
    assert run.backend.asked > 0  # there might have been a job


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
        seen.append((pool.failures, pool.needs_person))
        clock.pass_s(1)
    assert seen == [(1, False), (2, False), (3, True)]
    assert pool.trouble == "Limit exceeded (code 7)"
    assert run.replicas.get().state == "restarting"
