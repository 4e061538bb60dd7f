"""What the control plane writes into a run's bucket: commands to replicas, and the journal.

Its own task, so that a bucket that hangs or denies delays no decision of control: what is to be
written is in the database, and stays due until it is written. A part that fails does not stop the
others.
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
from runs.reconcile import draining
from runs.reconcile.context import Tick

logger = logging.getLogger(__name__)

WRITE_FAILED = "could not be written"
"""In the message of each event about a failed write; pages show the newest."""


def has_writes(tick: Tick) -> bool:
    """Whether something is to be written. Two queries at most."""
    run = tick.run
    return (
        wants_stop(run)
        or _wants_save(run)
        or bool(draining.replicas_to_drain(tick))
        or journal.has_news(run, now=tick.now)
    )


def write_run(run_id: str) -> str:
    """Write what is due; returns why the store did not answer, '' if it did. Does not raise for a
    store that fails. Nothing is written for a run that is being deleted, or is gone."""
    runs = Run.objects.select_related("owner", "store_credential")
    run = runs.filter(pk=run_id, delete_requested_at=None).first()
    if run is None:
        return ""
    now = timezone.now()
    attempts = ReplicaAttempt.objects.filter(replica__run=run)
    if not attempts.exists():
        return ""
    tick = Tick(
        run=run,
        now=now,
        replicas=list(run.replicas.select_related("pool", "run").order_by("number")),
        attempts=list(attempts.filter(ended_at=None)),
    )
    opened: list[Store] = []
    what = "the rendezvous could not be opened"
    trouble = _write(tick, what, lambda: opened.append(store_for(run)))
    if not opened:
        if journal.has_news(run, now=now):
            journal.put_off(run, now=now)
        return trouble
    [store] = opened
    trouble = _write(tick, f"a command {WRITE_FAILED}", lambda: _send_commands(tick, store))
    return trouble or _write_journal(tick, store)


def wants_stop(run: Run) -> bool:
    """One that is ended by force could still write final weights, and then not be resumed."""
    return run.stop_requested_at is not None and run.cancel_at is None and run.stop_sent_at is None


def _wants_save(run: Run) -> bool:
    return run.save_requested_at is not None and run.save_sent_at != run.save_requested_at


def _send_commands(tick: Tick, store: Store) -> None:
    run = tick.run
    if wants_stop(run):
        send_stop(run, store, tick.now)
    draining.send_drains(tick, store)
    if _wants_save(run):
        send_save(run, store, tick.now)  # of a round after those that ingest has seen


def _write_journal(tick: Tick, store: Store) -> str:
    if not journal.has_news(tick.run, now=tick.now):
        return ""

    def write() -> None:
        journal.write_journal(tick.run, store, now=tick.now)

    tick.failed.clear()
    trouble = _write(tick, f"the journal {WRITE_FAILED}", write)
    if tick.failed:
        journal.put_off(tick.run, now=tick.now)
    return trouble


def _write(tick: Tick, what: str, write: Callable[[], None]) -> str:
    try:
        write()
    except StoreError as error:
        return _failed(tick, what, error)
    except Exception as error:
        logger.exception("run %s: %s", tick.run.pk, what)
        tick.failed.append(what)
        store_event(tick.run, f"{what}: {type(error).__name__}: {error}", tick.now)
    return ""


def _failed(tick: Tick, what: str, error: StoreError) -> str:
    logger.warning("run %s: %s: %s", tick.run.pk, what, error)
    tick.failed.append(what)
    store_event(tick.run, f"{what}: {error}", tick.now)
    return str(error) if isinstance(error, StoreUnavailable) else ""
