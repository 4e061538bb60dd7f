"""The wall clock is set back by hours: what was about to happen happens, and not hours later."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from executors.base import Cause
from runs.actions import lifecycle, replicas_and_pools
from runs.alerts import webhooks
from runs.backends import circuit_breaker
from runs.models import ReplicaPool, Webhook, WebhookDelivery
from runs.reconcile import retry_policy

pytestmark = pytest.mark.django_db
HOURS_S = -7200.0


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    made = make_world(replicas=2)
    made.start()
    return made


def test_a_forced_stop_acts_at_once(world: Any) -> None:
    lifecycle.force_stop(world.run, actor=world.run.owner)
    world.control(HOURS_S)
    assert sorted(world.executor.cancelled) == sorted(world.executor.jobs)


def test_a_stop_that_replicas_do_not_obey_ends_their_jobs(world: Any) -> None:
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.control()
    assert world.executor.cancelled == []
    world.control(HOURS_S)
    assert sorted(world.executor.cancelled) == sorted(world.executor.jobs)


@pytest.mark.parametrize("force", [True, False])
def test_a_stop_of_one_replica_ends_its_job(world: Any, force: bool) -> None:
    replicas_and_pools.stop_replica(world.replica(0), actor=world.run.owner, force=force)
    world.control(HOURS_S)
    assert world.executor.cancelled == [world.key(0)]


def test_a_replica_that_failed_is_launched_again(world: Any) -> None:
    world.executor.end(world.key(0), Cause.ERROR, code=1)
    world.control()
    assert (world.replica(0).state, world.executor.launches) == ("restarting", 2)
    world.control(HOURS_S)
    world.work()
    assert (world.replica(0).state, world.executor.launches) == ("provisioning", 3)


def test_a_launch_that_was_lost_is_closed(make_world: Callable[..., Any]) -> None:
    world = make_world(replicas=1)
    attempts = world.replica(0).attempts
    attempts.update(handle=None, launched_at=None)
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.executor.jobs.clear()
    world.control(HOURS_S)
    assert attempts.get().ended_at is not None


@pytest.mark.parametrize("fail", [circuit_breaker.count_failure, circuit_breaker.wait_for_capacity])
def test_a_pool_that_is_left_alone_is_tried_again(world: Any, fail: Any) -> None:
    for _ in range(circuit_breaker.FAILURES):
        fail(world.run.pools.get(), "away")
    assert not circuit_breaker.may_launch(world.run.pools.get(), world.clock())
    world.clock.pass_s(HOURS_S)
    pool = world.run.pools.get()
    assert circuit_breaker.may_launch(pool, world.clock())
    fail(pool, "still away")
    pool = ReplicaPool.objects.get()
    assert pool.closed_until is not None
    assert world.clock() < pool.closed_until < world.clock() + timedelta(minutes=5)


def test_a_webhook_is_sent_again(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, ...]] = []
    monkeypatch.setattr(webhooks, "enqueue", lambda *task: sent.append(task))
    hook = Webhook.objects.create(
        name="hook", url="http://127.0.0.1:1/", created_at=world.clock(),
        sealed=webhooks.sealed_secret(webhooks.new_secret()),
    )  # fmt: skip
    delivery = WebhookDelivery.objects.create(
        webhook=hook, kind="test", body="{}", created_at=world.clock(),
        next_at=world.clock() + webhooks.WAITS[-1],
    )  # fmt: skip
    webhooks.call_for_due()
    assert sent == []
    world.clock.pass_s(HOURS_S)
    webhooks.call_for_due()
    assert sent == [("deliver_webhook", str(delivery.pk))]
    webhooks.deliver(str(delivery.pk))
    delivery.refresh_from_db()
    assert (delivery.attempts, delivery.next_at > world.clock()) == (1, True)


@pytest.mark.parametrize("round_s", [None, 1.0, 1e9])
@pytest.mark.parametrize("lifetime_s", [1.0, 1e9])
def test_nothing_is_put_off_for_longer_than_the_limits_say(
    round_s: float | None, lifetime_s: float
) -> None:
    assert timedelta(seconds=retry_policy.drain_s(round_s)) <= retry_policy.CANCEL_WITHIN
    assert (
        timedelta(seconds=retry_policy.hand_over_s(round_s, lifetime_s))
        <= retry_policy.CANCEL_WITHIN
    )
