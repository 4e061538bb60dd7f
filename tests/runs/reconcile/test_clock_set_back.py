"""The wall clock is set back by hours: due actions are not delayed by that time."""

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


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def test_a_forced_stop_acts_at_once(harness: Any) -> None:
    lifecycle.force_stop(harness.run, actor=harness.run.owner)
    harness.control(HOURS_S)
    assert sorted(harness.executor.cancelled) == sorted(harness.executor.jobs)


def test_a_stop_that_replicas_ignore_ends_their_jobs(harness: Any) -> None:
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.control()
    assert harness.executor.cancelled == []
    harness.control(HOURS_S)
    assert sorted(harness.executor.cancelled) == sorted(harness.executor.jobs)


@pytest.mark.parametrize("force", [True, False])
def test_a_stop_of_one_replica_ends_its_job(harness: Any, force: bool) -> None:
    replicas_and_pools.stop_replica(harness.replica(0), actor=harness.run.owner, force=force)
    harness.control(HOURS_S)
    assert harness.executor.cancelled == [harness.key(0)]


def test_a_replica_that_failed_is_launched_again(harness: Any) -> None:
    harness.executor.end(harness.key(0), Cause.ERROR, code=1)
    harness.control()
    assert (harness.replica(0).state, harness.executor.launches) == ("restarting", 2)
    harness.control(HOURS_S)
    harness.work()
    assert (harness.replica(0).state, harness.executor.launches) == ("provisioning", 3)


def test_a_launch_that_was_lost_is_closed(make_harness: Callable[..., Any]) -> None:
    harness = make_harness(replicas=1)
    attempts = harness.replica(0).attempts
    attempts.update(handle=None, launched_at=None)
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.executor.jobs.clear()
    harness.control(HOURS_S)
    assert attempts.get().ended_at is not None


@pytest.mark.parametrize("fail", [circuit_breaker.count_failure, circuit_breaker.wait_for_capacity])
def test_a_pool_with_an_open_breaker_is_tried_again(harness: Any, fail: Any) -> None:
    for _ in range(circuit_breaker.FAILURES):
        fail(harness.run.pools.get(), "away")
    assert not circuit_breaker.can_launch(harness.run.pools.get(), harness.clock())
    harness.clock.pass_s(HOURS_S)
    pool = harness.run.pools.get()
    assert circuit_breaker.can_launch(pool, harness.clock())
    fail(pool, "still away")
    pool = ReplicaPool.objects.get()
    assert pool.open_until is not None
    assert harness.clock() < pool.open_until < harness.clock() + timedelta(minutes=5)


def test_a_webhook_is_sent_again(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, ...]] = []
    monkeypatch.setattr(webhooks, "enqueue", lambda *task: sent.append(task))
    hook = Webhook.objects.create(
        name="hook",
        url="http://127.0.0.1:1/",
        created_at=harness.clock(),
        sealed=webhooks.sealed_secret(webhooks.new_secret()),
    )
    delivery = WebhookDelivery.objects.create(
        webhook=hook,
        kind="test",
        body="{}",
        created_at=harness.clock(),
        next_at=harness.clock() + webhooks.WAITS[-1],
    )
    webhooks.call_for_due()
    assert sent == []
    harness.clock.pass_s(HOURS_S)
    webhooks.call_for_due()
    assert sent == [("deliver_webhook", str(delivery.pk))]
    webhooks.deliver(str(delivery.pk))
    delivery.refresh_from_db()
    assert (delivery.attempts, delivery.next_at > harness.clock()) == (1, True)


@pytest.mark.parametrize("round_s", [None, 1.0, 1e9])
@pytest.mark.parametrize("lifetime_s", [1.0, 1e9])
def test_no_delay_exceeds_its_limit(round_s: float | None, lifetime_s: float) -> None:
    assert timedelta(seconds=retry_policy.drain_s(round_s)) <= retry_policy.CANCEL_WITHIN
    assert (
        timedelta(seconds=retry_policy.replace_s(round_s, lifetime_s)) <= retry_policy.CANCEL_WITHIN
    )
