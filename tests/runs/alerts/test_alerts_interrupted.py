"""A worker is killed between what happened and the alert of it: the next tick makes it good, once.

Where it is killed is the code path's, not the clock's: a step raises what nothing catches.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from executors.base import Cause
from runs.actions import lifecycle, replicas_and_pools
from runs.alerts import webhooks
from runs.models import Alert, Journal, Round, Run, TelemetryCursor, Webhook, WebhookDelivery
from runs.queries import selectors
from runs.reconcile.reconciler import reconcile_run
from tests.runs.reconcile.test_reconcile_interrupted import Killed

pytestmark = pytest.mark.django_db


@pytest.fixture
def hook() -> Webhook:
    return Webhook.objects.create(
        name="ops", url="http://127.0.0.1:1/", kinds=["finished", "replica_lost", "spike"],
        sealed=webhooks.sealed_secret(webhooks.new_secret()), enabled=True,
        created_at=timezone.now(),
    )  # fmt: skip


@pytest.fixture
def world(make_world: Any) -> Any:
    made = make_world(total_rounds=40)
    made.start()
    return made


def killed_tick(world: Any, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(step, die)
        with pytest.raises(Killed):
            world.tick()


def let_go_of(run: Run) -> None:
    """Nothing else is left to be done for it."""
    run.replicas.update(state="done")
    TelemetryCursor.objects.update(ended=True)
    Journal.objects.update(due=False)


BEFORE_IT_IS_TOLD = [
    "runs.alerts.store.watch",
    "runs.alerts.store.judge",
    "runs.alerts.store.tell",
    "runs.alerts.webhooks.announce",
    "runs.alerts.webhooks.enqueue",
]


@pytest.mark.parametrize("step", BEFORE_IT_IS_TOLD)
def test_an_end_is_told_although_the_worker_died_before_it_could(
    world: Any, monkeypatch: pytest.MonkeyPatch, hook: Webhook, step: str
) -> None:
    world.bucket.final(4)
    world.beat_all("done")
    for number in (0, 1):
        world.executor.end(world.key(number), Cause.DONE, code=0)
    world.control()
    world.ingest()  # what control waits for: the next tick decides on the end
    killed_tick(world, monkeypatch, step)
    run = Run.objects.get(pk=world.run.pk)
    assert run.state == "succeeded"
    assert not Alert.objects.filter(kind="finished").exists()
    let_go_of(run)
    assert list(selectors.runs_to_look_after()) == [run]
    for _ in range(3):
        reconcile_run(str(run.pk))
    alert = Alert.objects.get(kind="finished")
    assert (alert.times, alert.message) == (1, "succeeded: completed at round 4 (4 of 40 rounds)")
    assert WebhookDelivery.objects.filter(kind="finished").count() == 1
    let_go_of(run)
    assert not selectors.runs_to_look_after().exists()


def test_a_second_end_is_told_as_well(world: Any) -> None:
    """Resumed, and stopped once more."""
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    for number in (0, 1):
        world.executor.end(world.key(number), Cause.CANCELLED)
    world.tick()
    world.tick()
    assert Run.objects.get().state == "cancelled"
    assert Alert.objects.get(kind="finished").times == 1
    assert lifecycle.resume(Run.objects.get(), actor=world.run.owner)
    assert not Run.objects.get().end_due
    world.clock.pass_s(1)
    replicas_and_pools.request_stop(Run.objects.get(), actor=world.run.owner)
    assert Run.objects.get().state in ("stopping", "cancelled")
    world.tick()
    world.tick()
    assert Alert.objects.get(kind="finished").times == 2


@pytest.mark.parametrize("step", ["runs.alerts.store.watch", "runs.alerts.store.tell"])
def test_a_lost_replica_is_told_of_although_it_was_launched_again_meanwhile(
    world: Any, monkeypatch: pytest.MonkeyPatch, hook: Webhook, step: str
) -> None:
    world.executor.end(world.key(1), Cause.LOST, said="the node is gone")
    world.beat_all(but=(1,))
    killed_tick(world, monkeypatch, step)
    assert world.replica(1).state == "restarting"
    assert not Alert.objects.exists()
    world.clock.pass_s(20)  # as long as the dead worker's lease
    world.outbox.append(("launch_pool", world.run.pools.get().pk))
    world.work()
    assert world.replica(1).state == "provisioning"
    world.beat_all(but=(1,))
    world.tick()
    alert = Alert.objects.get(kind="replica_lost")
    assert (alert.replica, alert.times, alert.closed_at) == (world.replica(1), 1, None)
    assert WebhookDelivery.objects.filter(kind="replica_lost").count() == 1
    world.beat_all()
    world.bucket.beat(1, 1, "computing", seq=2)
    world.tick()
    assert Alert.objects.get(kind="replica_lost").closed_at is not None
    assert world.replica(1).fell_at is None


def test_a_restart_that_somebody_asked_for_is_no_loss(world: Any) -> None:
    replicas_and_pools.restart_replica(world.replica(1), actor=world.run.owner)
    world.beat_all()
    world.tick()
    assert not Alert.objects.filter(kind="replica_lost").exists()


@pytest.mark.parametrize("step", ["runs.alerts.store.watch", "runs.alerts.store.tell"])
def test_rounds_that_were_read_and_not_judged_are_judged_by_the_next_tick(
    world: Any, monkeypatch: pytest.MonkeyPatch, hook: Webhook, step: str
) -> None:
    bucket = world.bucket

    def round(n: int, loss: float) -> None:
        for replica in (0, 1):
            bucket.contribution(n, replica)
        bucket.plan(n, [0, 1])
        bucket.commit(n, [0, 1])
        bucket.segment(0, n, losses=[loss], first=n, rounds=(bucket.report(n),))
        world.beat_all(round=n)

    for n in range(1, 7):
        round(n, 3.0)
        world.tick()
    Round.objects.update(loss=3.0)
    round(7, 3.0)
    killed_tick(world, monkeypatch, "runs.alerts.store.watch")
    Round.objects.filter(number=7).update(loss=30.0)
    if step.endswith("tell"):
        killed_tick(world, monkeypatch, step)
    assert not Alert.objects.filter(kind="spike").exists()
    world.beat_all(round=7)
    world.tick()
    assert Alert.objects.get(kind="spike").message.startswith("loss 30 in round 7")
    assert WebhookDelivery.objects.filter(kind="spike").count() == 1
    assert Run.objects.get().watched_round == 7


@pytest.mark.parametrize("ends", ["succeeded", "cancelled", "failed"])
def test_an_end_is_announced_once_though_time_passes_within_a_tick(
    world: Any, hook: Webhook, ends: str
) -> None:
    world.clock.moves_s = 0.003
    if ends == "succeeded":
        world.bucket.final(4)
    elif ends == "cancelled":
        replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    else:
        for number in (0, 1):
            replicas_and_pools.stop_replica(world.replica(number), actor=world.run.owner)
    for number in (0, 1):
        world.executor.end(world.key(number), Cause.DONE, code=0)
    for _ in range(6):
        world.tick()
    assert Run.objects.get(pk=world.run.pk).state == ends
    assert Alert.objects.get(kind="finished").times == 1
    assert WebhookDelivery.objects.filter(kind="finished").count() == 1


def test_an_end_is_announced_once_by_two_workers(world: Any, hook: Webhook) -> None:
    """Both have read the run before either has judged it, and their clocks differ."""
    world.clock.moves_s = 0.003
    world.bucket.final(4)
    for number in (0, 1):
        world.executor.end(world.key(number), Cause.DONE, code=0)
    world.tick()
    assert WebhookDelivery.objects.filter(kind="finished").count() == 1
    for jump_s in (-3600, 7200):
        world.clock.pass_s(jump_s)
        Run.objects.filter(pk=world.run.pk).update(end_due=True, watched_round=99)
        world.tick()
    assert WebhookDelivery.objects.filter(kind="finished").count() == 1
