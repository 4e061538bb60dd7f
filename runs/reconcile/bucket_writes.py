"""Writes commands to replicas and the journal into a run's bucket.

This is a separate task, so that a bucket that hangs or denies access delays no decision of control.
Pending writes are recorded in the database and stay due until they succeed. A failing part does not
stop the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from django.utils import timezone

from diloco.store.base import Store, StoreError, StoreUnavailable
from runs.ingest import journal
from runs.ingest.commands import send_save, send_stop
from runs.ingest.ingest_pass import store_event
from runs.ingest.stores import store_for
from runs.models import ReplicaAttempt, Run
from runs.queries.run_page import WRITE_FAILED
from runs.reconcile import draining
from runs.reconcile.context import ReconcileContext

logger = logging.getLogger(__name__)


def has_writes(context: ReconcileContext) -> bool:
    """Whether a write is due. Costs at most two queries."""
    run = context.run
    return (
        is_stop_due(run)
        or _is_save_due(run)
        or bool(draining.replicas_to_drain(context))
        or journal.is_write_due(run, now=context.now)
    )


def write_run(run_id: str) -> str:
    """Write what is due; return why the store is unavailable, '' if it is available.

    Does not raise for a failing store. Does nothing for a run that is being deleted or was deleted.
    """
    runs = Run.objects.select_related("owner", "store_credential")
    run = runs.filter(pk=run_id, delete_requested_at=None).first()
    if run is None:
        return ""
    now = timezone.now()
    attempts = ReplicaAttempt.objects.filter(replica__run=run)
    if not attempts.exists():
        return ""
    context = ReconcileContext(
        run=run,
        now=now,
        replicas=list(run.replicas.select_related("pool").order_by("number")),
        attempts=list(attempts.filter(ended_at=None)),
    )
    opened: list[Store] = []
    action = "the rendezvous could not be opened"
    problem = _write(context, action, lambda: opened.append(store_for(run)))
    if not opened:
        if journal.is_write_due(run, now=now):
            journal.delay_retry(run, now=now)
        return problem
    [store] = opened
    problem = _write(context, f"a command {WRITE_FAILED}", lambda: _send_commands(context, store))
    return problem or _write_journal(context, store)


def is_stop_due(run: Run) -> bool:
    """Whether a stop command is due. A run that is cancelled by force gets none: it could still
    write final weights, and could then not be resumed."""
    return run.stop_requested_at is not None and run.cancel_at is None and run.stop_sent_at is None


def _is_save_due(run: Run) -> bool:
    return run.save_requested_at is not None and run.save_sent_at != run.save_requested_at


def _send_commands(context: ReconcileContext, store: Store) -> None:
    run = context.run
    if is_stop_due(run):
        send_stop(run, store, context.now)
    draining.send_drains(context, store)
    if _is_save_due(run):
        send_save(run, store, context.now)  # of a round after the ingested ones


def _write_journal(context: ReconcileContext, store: Store) -> str:
    if not journal.is_write_due(context.run, now=context.now):
        return ""

    def write() -> None:
        journal.write_journal(context.run, store, now=context.now)

    context.failed.clear()
    problem = _write(context, f"the journal {WRITE_FAILED}", write)
    if context.failed:
        journal.delay_retry(context.run, now=context.now)
    return problem


def _write(context: ReconcileContext, action: str, write: Callable[[], None]) -> str:
    try:
        write()
    except StoreError as error:
        return _failed(context, action, error)
    except Exception as error:
        logger.exception("run %s: %s", context.run.pk, action)
        context.failed.append(action)
        store_event(context.run, f"{action}: {type(error).__name__}: {error}", context.now)
    return ""


def _failed(context: ReconcileContext, action: str, error: StoreError) -> str:
    logger.warning("run %s: %s: %s", context.run.pk, action, error)
    context.failed.append(action)
    store_event(context.run, f"{action}: {error}", context.now)
    return str(error) if isinstance(error, StoreUnavailable) else ""
