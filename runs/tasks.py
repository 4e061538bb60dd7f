"""Celery tasks: thin, idempotent, taking ids. Acknowledged late, so one whose worker died comes
again; the reconciler makes good what was lost all the same."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from runs import deletion, live, selectors
from runs.alerting import webhooks
from runs.context import about
from runs.control import health, hub_export, launch, reaper, reconcile
from runs.control.lease import lease
from runs.drafts.archives import sweep_archives
from runs.exceptions import LaunchLater
from runs.queue import enqueue

TICK_EXPIRES_S = 5.0
EXPORT_S = 3600
"""The longest upload of a checkpoint."""


@shared_task
def reconcile_active() -> None:
    """Beat's tick: one task per run that needs looking after."""
    health.beat()
    for run_id in selectors.runs_to_look_after().values_list("pk", flat=True):
        enqueue("reconcile_run", str(run_id), expires=TICK_EXPIRES_S)


@shared_task
def reconcile_run(run_id: str) -> None:
    with about(run=run_id), lease(f"reconcile:{run_id}") as held:
        if held:
            whole = live.begin(run_id) or live.resync(run_id)
            if reconcile.reconcile_run(run_id) and whole:
                live.told(run_id)


@shared_task(autoretry_for=(LaunchLater,), retry_backoff=2, retry_backoff_max=30, max_retries=20)
def launch_run(run_id: str) -> None:
    """One at a time per run: a fork copies a checkpoint, which may take a while."""
    with about(run=run_id), lease(f"launch-run:{run_id}") as held:
        if held:
            launch.launch_run(run_id)


@shared_task(autoretry_for=(LaunchLater,), retry_backoff=2, retry_backoff_max=30, max_retries=20)
def launch_pool(pool_id: int) -> None:
    """One at a time per pool, so that ticks do not pile up workers on a backend that hangs."""
    with lease(f"launch:{pool_id}") as held:
        if held:
            launch.launch_pool(pool_id)


@shared_task(autoretry_for=(LaunchLater,), retry_backoff=2, retry_backoff_max=60, max_retries=20)
def delete_run(run_id: str) -> None:
    with about(run=run_id), lease(f"delete:{run_id}") as held:
        if held:
            deletion.delete_run(run_id)


@shared_task(acks_late=False, soft_time_limit=EXPORT_S - 60, time_limit=EXPORT_S)
def export_checkpoint(
    checkpoint_id: int, credential_id: int, repository: str, private: bool, actor_id: int
) -> None:
    """Longer than other tasks, so it is acknowledged before it begins: one whose worker dies does
    not come again, and whoever asked for it sees no end of it and asks anew."""
    hub_export.export(checkpoint_id, credential_id, repository, private, actor_id)


@shared_task
def webhooks_due() -> None:
    webhooks.call_for_due()


@shared_task
def deliver_webhook(delivery_id: str) -> None:
    webhooks.deliver(delivery_id)


@shared_task
def forget_uploads() -> None:
    sweep_archives(now=timezone.now())


@shared_task
def reap() -> None:
    with lease("reap") as held:
        if held:
            reaper.reap()
            for run_id in selectors.runs_to_delete().values_list("pk", flat=True):
                enqueue("delete_run", str(run_id))
