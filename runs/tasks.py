"""Celery tasks: thin and idempotent, with IDs as arguments.

They are acknowledged late, so that a task whose worker died is delivered again. The reconciler
also repeats lost work.
"""

from __future__ import annotations

import time

from celery import shared_task
from django.utils import timezone

from runs import live_stream
from runs.actions import deletion
from runs.alerts import webhooks
from runs.backends import health, shared_breakers, storage_health
from runs.backends.redis_lock import lease
from runs.evaluations import advance, schedule
from runs.exceptions import LaunchLater
from runs.export import hub_upload
from runs.ingest import ingest_pass
from runs.log_context import about
from runs.models import ReplicaPool
from runs.queries import selectors
from runs.reconcile import bucket_writes, budgets, launch, orphan_reaper, reconciler, sweeps
from runs.restore import import_run
from runs.submit.uploads import sweep_archives
from runs.task_queue import enqueue
from runs.trackers import mirror

TICK_EXPIRES_S = 5.0
INGEST_SOFT_S, INGEST_S = 40, 60
"""Time limits of an ingest pass. The budget of a pass ends it after seconds, so only a record that
takes this long to process reaches these limits; that counts as a failure of the record."""
DELETE_S = 900
"""Time limit for deleting a run. Its prefix can hold any number of other objects, which are listed.
:func:`reap` enqueues a killed deletion again."""
MIRROR_S = 300
"""Time limit of one pass to a tracker; below the time after which a pass is due again."""
EVALUATION_S = 240
"""Time limit of one step of an evaluation; below the time after which a step is due again."""
EXPORT_S = 3600
"""Time limit for uploading a checkpoint."""


@shared_task
def reconcile_active() -> None:
    """Control tick, sent by Celery beat: enqueue one task for each run, and each sweep, that needs
    control."""
    health.beat()
    storage_health.probe_database()
    for run_id in selectors.runs_to_reconcile().values_list("pk", flat=True):
        enqueue("reconcile_run", str(run_id), expires=TICK_EXPIRES_S)
    for sweep_id in sweeps.sweeps_to_control().values_list("pk", flat=True):
        enqueue("control_sweep", str(sweep_id), expires=TICK_EXPIRES_S)


@shared_task
def control_sweep(sweep_id: str) -> None:
    """Control of one sweep: its held runs and its budget."""
    with lease(f"sweep:{sweep_id}") as held:
        if held:
            sweeps.control_sweep(sweep_id)


@shared_task
def reconcile_run(run_id: str) -> None:
    """Control of one run. Needs only the database and the backends."""
    with about(run=run_id), lease(f"reconcile:{run_id}") as held:
        if held:
            complete = live_stream.mark_pending(run_id) or live_stream.resync(run_id)
            if reconciler.reconcile_run(run_id) and complete:
                live_stream.mark_published(run_id)


@shared_task
def ingest_active() -> None:
    """Ingest tick, sent by Celery beat: enqueue one task for each run."""
    health.beat(health.INGEST)
    for run_id in selectors.runs_to_reconcile().values_list("pk", flat=True):
        enqueue("ingest_run", str(run_id), expires=TICK_EXPIRES_S)


# Acknowledged early: a pass whose process was killed is not delivered again at once, because the
# next tick sends another.
@shared_task(acks_late=False, soft_time_limit=INGEST_SOFT_S, time_limit=INGEST_S)
def ingest_run(run_id: str) -> None:
    """Ingest new records of the bucket, unless its store is unavailable or busy."""
    with about(run=run_id), lease(f"ingest:{run_id}") as held:
        if not held:
            return
        place = shared_breakers.store_place_of(run_id)
        if place is None or shared_breakers.is_open(shared_breakers.prefix_place(run_id)):
            return
        with shared_breakers.slot(place) as free:
            if not free:
                state = shared_breakers.state_of(place)
                if state.failures:
                    ingest_pass.note_open_breaker(run_id, state.message)
                return
            name = f"{run_id}:ingest"
            complete = live_stream.mark_pending(name) or live_stream.resync(run_id)
            if ingest_pass.ingest_run(run_id) and complete:
                live_stream.mark_published(name)
            _report_place(place, ingest_pass.has_store_failed(run_id))


@shared_task(acks_late=False, soft_time_limit=INGEST_SOFT_S, time_limit=INGEST_S)
def write_bucket(run_id: str) -> None:
    """Write commands and the journal to the bucket."""
    with about(run=run_id), lease(f"write:{run_id}") as held:
        place = shared_breakers.store_place_of(run_id)
        if not held or place is None:
            return
        with shared_breakers.slot(f"{place}:write") as free:
            if free and not shared_breakers.is_open(place):
                _report_place(place, bucket_writes.write_run(run_id))


def _report_place(place: str, failure: str) -> None:
    if failure:
        shared_breakers.failed(place, failure)
    else:
        shared_breakers.answered(place)


@shared_task(autoretry_for=(LaunchLater,), retry_backoff=2, retry_backoff_max=30, max_retries=20)
def launch_run(run_id: str) -> None:
    """Launch a run, one task at a time per run: a fork first copies a checkpoint."""
    with about(run=run_id), lease(f"launch-run:{run_id}") as held:
        if held:
            _wait_for_store(run_id)
            launch.launch_run(run_id)


@shared_task(autoretry_for=(LaunchLater,), retry_backoff=2, retry_backoff_max=30, max_retries=20)
def launch_pool(pool_id: int) -> None:
    """Launch the replicas of a pool.

    One task at a time per pool, so that a backend that hangs does not block many workers.
    """
    with lease(f"launch:{pool_id}") as held:
        if held:
            pool = ReplicaPool.objects.filter(pk=pool_id).first()
            if pool is not None:
                _wait_for_store(str(pool.run_id))
                _wait_for(shared_breakers.account_place(pool))
            launch.launch_pool(pool_id)


def _wait_for_store(run_id: str) -> None:
    place = shared_breakers.store_place_of(run_id)
    if place is not None:
        _wait_for(place)


def _wait_for(place: str) -> None:
    """Retry a launch later, so that it does not block a worker while the breaker is open."""
    state = shared_breakers.state_of(place)
    if state.is_open(time.time()):
        raise LaunchLater(state.message)


@shared_task(
    autoretry_for=(LaunchLater,),
    retry_backoff=2,
    retry_backoff_max=60,
    max_retries=20,
    acks_late=False,
    soft_time_limit=DELETE_S - 60,
    time_limit=DELETE_S,
)
def delete_run(run_id: str) -> None:
    """Delete a run, unless :func:`write_bucket` is writing for it.

    Otherwise that object would appear after the others were deleted. A write that starts later sees
    the deletion request.
    """
    with about(run=run_id), lease(f"delete:{run_id}") as held:
        if not held:
            return
        with lease(f"write:{run_id}") as no_writer:
            if not no_writer:
                raise LaunchLater("the journal of the run is being written")
            deletion.delete_run(run_id)


@shared_task(acks_late=False, soft_time_limit=EXPORT_S - 60, time_limit=EXPORT_S)
def export_checkpoint(
    checkpoint_id: int, credential_id: int, repository: str, private: bool, actor_id: int
) -> None:
    """Upload a checkpoint to the Hugging Face Hub.

    It takes longer than other tasks, so it is acknowledged early: if its worker dies, it is not
    delivered again, and the user repeats the request.
    """
    hub_upload.export(checkpoint_id, credential_id, repository, private, actor_id)


@shared_task
def beat_launch() -> None:
    """Heartbeat of the launch worker, sent by Celery beat."""
    health.beat(health.LAUNCH)


@shared_task
def webhooks_due() -> None:
    webhooks.call_for_due()


@shared_task(soft_time_limit=webhooks.ATTEMPT_S, time_limit=webhooks.ATTEMPT_S + 10)
def deliver_webhook(delivery_id: str) -> None:
    """Make one attempt of a delivery, unless its receiver did not answer a moment ago. Two at a
    time, so that receivers that hang leave workers for launches."""
    place = webhooks.place_of(delivery_id)
    if place is None:
        return
    with shared_breakers.slot(place) as free, shared_breakers.slot("webhooks") as is_free:
        response = webhooks.deliver(delivery_id) if free and is_free else None
    if response is not None:
        _report_place(place, "" if response.status is not None else response.text)


@shared_task
def mirrors_due() -> None:
    mirror.call_for_due()


# Acknowledged early: a pass whose worker was killed is due again after the claim of the pass.
@shared_task(acks_late=False, soft_time_limit=MIRROR_S - 60, time_limit=MIRROR_S)
def mirror_run(mirror_id: str) -> None:
    """Deliver new metrics of one run to one tracker. Two at a time, so that trackers that hang
    leave workers for launches."""
    free_slot = shared_breakers.slot("trackers", longest_s=MIRROR_S)
    with lease(f"mirror:{mirror_id}") as held, free_slot as free:
        if held and free:
            mirror.mirror(mirror_id)


@shared_task
def evaluations_due() -> None:
    schedule.call_for_due()


# Acknowledged early: a step whose worker was killed is due again after the claim of the step.
@shared_task(acks_late=False, soft_time_limit=EVALUATION_S - 60, time_limit=EVALUATION_S)
def advance_evaluation(evaluation_id: int) -> None:
    """Make the next step of an evaluation, one at a time for each run. Two at a time for each
    account and each bucket, so that those that hang leave workers for launches."""
    places = schedule.places_of(evaluation_id)
    if places is None:
        return
    with (
        about(run=places.run),
        lease(f"evaluate:{places.run}") as held,
        shared_breakers.slot(places.account, longest_s=EVALUATION_S) as free,
        shared_breakers.slot(f"{places.store}:evaluate", longest_s=EVALUATION_S) as is_free,
    ):
        if held and free and is_free:
            advance.advance(evaluation_id)


@shared_task
def forget_uploads() -> None:
    sweep_archives(now=timezone.now())


@shared_task
def evaluate_budgets() -> None:
    with lease("budgets") as held:
        if held:
            budgets.evaluate_budgets(timezone.now())


@shared_task
def reap() -> None:
    with lease("reap") as held:
        if held:
            for run_id in selectors.runs_to_delete().values_list("pk", flat=True):
                enqueue("delete_run", str(run_id))
            orphan_reaper.reap()
            import_run.remove_abandoned(timezone.now())
