"""Celery tasks: thin, idempotent, taking ids. Acknowledged late, so one whose worker died comes
again; the reconciler makes good what was lost all the same."""

from __future__ import annotations

from celery import shared_task

from runs import launch, reconcile, selectors
from runs.exceptions import LaunchLater
from runs.lease import lease
from runs.queue import enqueue

TICK_EXPIRES_S = 5.0


@shared_task
def reconcile_active() -> None:
    """Beat's tick: one task per run that needs looking after."""
    for run_id in selectors.runs_to_look_after().values_list("pk", flat=True):
        enqueue("reconcile_run", str(run_id), expires=TICK_EXPIRES_S)


@shared_task
def reconcile_run(run_id: str) -> None:
    with lease(f"reconcile:{run_id}") as held:
        if held:
            reconcile.reconcile_run(run_id)


@shared_task(autoretry_for=(LaunchLater,), retry_backoff=2, retry_backoff_max=30, max_retries=20)
def launch_run(run_id: str) -> None:
    launch.launch_run(run_id)


@shared_task(autoretry_for=(LaunchLater,), retry_backoff=2, retry_backoff_max=30, max_retries=20)
def launch_replica(replica_id: int) -> None:
    launch.launch_replica(replica_id)
