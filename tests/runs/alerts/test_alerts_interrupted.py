"""A worker killed between an event and its alert: the next tick creates the alert, once.

The kill is simulated at a step of the code: the step raises an exception that no handler catches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from executors.base import Cause
from runs.actions import lifecycle, replicas_and_pools
from runs.alerts import webhooks
from runs.models import Alert, Journal, Round, Run, TelemetryCursor, Webhook, WebhookDelivery
from runs.queries import selectors
from runs.reconcile.reconciler import reconcile_run
from tests.matrix import matrix
from tests.runs.reconcile.test_reconcile_interrupted import Killed

pytestmark = pytest.mark.django_db


@pytest.fixture
def hook() -> Webhook:
    return Webhook.objects.create(
        name="ops",
        url="http://127.0.0.1:1/",
        kinds=["finished", "replica_lost", "spike"],
        sealed=webhooks.sealed_secret(webhooks.new_secret()),
        enabled=True,
        created_at=timezone.now(),
    )


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(total_rounds=40)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


def killed_tick(harness: Any, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(step, die)
        with pytest.raises(Killed):
            harness.tick()


def complete_other_work(run: Run) -> None:
    """Complete all other work for the run."""
    run.replicas.update(state="done")
    TelemetryCursor.objects.update(ended=True)
    Journal.objects.update(due=False)


STEPS_BEFORE_NOTIFICATION = [
    "runs.alerts.store.evaluate",
    "runs.alerts.store.apply_rules",
    "runs.alerts.store.notify",
    "runs.alerts.webhooks.announce",
    "runs.alerts.webhooks.enqueue",
]


@matrix("step", STEPS_BEFORE_NOTIFICATION, fast=("runs.alerts.webhooks.announce",))
def test_end_notifies_although_the_worker_died_before(
    harness: Any, monkeypatch: pytest.MonkeyPatch, hook: Webhook, step: str
) -> None:
    harness.bucket.final(4)
    harness.beat_all("done")
    for number in (0, 1):
        harness.executor.end(harness.key(number), Cause.DONE, code=0)
    harness.control()
    harness.ingest()  # control waits for this pass; the next tick ends the run
    killed_tick(harness, monkeypatch, step)
    run = Run.objects.get(pk=harness.run.pk)
    assert run.state == "succeeded"
    assert not Alert.objects.filter(kind="finished").exists()
    complete_other_work(run)
    assert list(selectors.runs_to_reconcile()) == [run]
    for _ in range(3):
        reconcile_run(str(run.pk))
    alert = Alert.objects.get(kind="finished")
    assert (alert.times, alert.message) == (1, "succeeded: completed at round 4 (4 of 40 rounds)")
    assert WebhookDelivery.objects.filter(kind="finished").count() == 1
    complete_other_work(run)
    assert not selectors.runs_to_reconcile().exists()


def test_second_end_notifies_again(harness: Any) -> None:
    """The run is resumed and stopped again."""
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    for number in (0, 1):
        harness.executor.end(harness.key(number), Cause.CANCELLED)
    harness.tick()
    harness.tick()
    assert Run.objects.get().state == "cancelled"
    assert Alert.objects.get(kind="finished").times == 1
    assert lifecycle.resume(Run.objects.get(), actor=harness.run.owner)
    assert not Run.objects.get().end_due
    harness.clock.pass_s(1)
    replicas_and_pools.request_stop(Run.objects.get(), actor=harness.run.owner)
    assert Run.objects.get().state in ("stopping", "cancelled")
    harness.tick()
    harness.tick()
    assert Alert.objects.get(kind="finished").times == 2


@pytest.mark.parametrize("step", ["runs.alerts.store.evaluate", "runs.alerts.store.notify"])
def test_lost_replica_notifies_although_it_was_relaunched_meanwhile(
    harness: Any, monkeypatch: pytest.MonkeyPatch, hook: Webhook, step: str
) -> None:
    harness.executor.end(harness.key(1), Cause.LOST, message="the node is gone")
    harness.beat_all(but=(1,))
    killed_tick(harness, monkeypatch, step)
    assert harness.replica(1).state == "restarting"
    assert not Alert.objects.exists()
    harness.clock.pass_s(20)  # as long as the dead worker's lease
    harness.outbox.append(("launch_pool", harness.run.pools.get().pk))
    harness.work()
    assert harness.replica(1).state == "provisioning"
    harness.beat_all(but=(1,))
    harness.tick()
    alert = Alert.objects.get(kind="replica_lost")
    assert (alert.replica, alert.times, alert.closed_at) == (harness.replica(1), 1, None)
    assert WebhookDelivery.objects.filter(kind="replica_lost").count() == 1
    harness.beat_all()
    harness.bucket.beat(1, 1, "computing", seq=2)
    harness.tick()
    assert Alert.objects.get(kind="replica_lost").closed_at is not None
    assert harness.replica(1).fell_at is None


def test_requested_restart_is_no_loss(harness: Any) -> None:
    replicas_and_pools.restart_replica(harness.replica(1), actor=harness.run.owner)
    harness.beat_all()
    harness.tick()
    assert not Alert.objects.filter(kind="replica_lost").exists()


@matrix("step", ["runs.alerts.store.evaluate", "runs.alerts.store.notify"], fast=1)
def test_unevaluated_rounds_are_evaluated_by_the_next_tick(
    harness: Any, monkeypatch: pytest.MonkeyPatch, hook: Webhook, step: str
) -> None:
    bucket = harness.bucket

    def round(n: int, loss: float) -> None:
        for replica in (0, 1):
            bucket.contribution(n, replica)
        bucket.plan(n, [0, 1])
        bucket.commit(n, [0, 1])
        bucket.segment(0, n, losses=[loss], first=n, rounds=(bucket.report(n),))
        harness.beat_all(round=n)

    for n in range(1, 7):
        round(n, 3.0)
        harness.tick()
    Round.objects.update(loss=3.0)
    round(7, 3.0)
    killed_tick(harness, monkeypatch, "runs.alerts.store.evaluate")
    Round.objects.filter(number=7).update(loss=30.0)
    if step.endswith("notify"):
        killed_tick(harness, monkeypatch, step)
    assert not Alert.objects.filter(kind="spike").exists()
    harness.beat_all(round=7)
    harness.tick()
    assert Alert.objects.get(kind="spike").message.startswith("loss 30 in round 7")
    assert WebhookDelivery.objects.filter(kind="spike").count() == 1
    assert Run.objects.get().watched_round == 7


@matrix("ends", ["succeeded", "cancelled", "failed"], fast=1)
def test_an_end_is_announced_once_though_time_passes_within_a_tick(
    harness: Any, hook: Webhook, ends: str
) -> None:
    harness.clock.moves_s = 0.003
    if ends == "succeeded":
        harness.bucket.final(4)
    elif ends == "cancelled":
        replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    else:
        for number in (0, 1):
            replicas_and_pools.stop_replica(harness.replica(number), actor=harness.run.owner)
    for number in (0, 1):
        harness.executor.end(harness.key(number), Cause.DONE, code=0)
    for _ in range(6):
        harness.tick()
    assert Run.objects.get(pk=harness.run.pk).state == ends
    assert Alert.objects.get(kind="finished").times == 1
    assert WebhookDelivery.objects.filter(kind="finished").count() == 1


def test_an_end_is_announced_once_by_two_workers(harness: Any, hook: Webhook) -> None:
    """Both read the run before either evaluates it, and their clocks differ."""
    harness.clock.moves_s = 0.003
    harness.bucket.final(4)
    for number in (0, 1):
        harness.executor.end(harness.key(number), Cause.DONE, code=0)
    harness.tick()
    assert WebhookDelivery.objects.filter(kind="finished").count() == 1
    for jump_s in (-3600, 7200):
        harness.clock.pass_s(jump_s)
        Run.objects.filter(pk=harness.run.pk).update(end_due=True, watched_round=99)
        harness.tick()
    assert WebhookDelivery.objects.filter(kind="finished").count() == 1
