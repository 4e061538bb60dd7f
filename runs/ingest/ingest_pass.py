"""One pass of ingest over one run: read what is new in its bucket into the tables.

Control (:mod:`runs.reconcile.reconciler`) never reads the bucket. It reads what a pass stored: the
replicas' beats, rounds, and :class:`~runs.models.IngestState`, which says which passes were
complete, what the final manifest is, and since when the bucket cannot be read.

The parts that control waits for (leases, rounds, final manifest) come first and end what counts as
a *complete* pass; telemetry follows and ends with its budget. A part that raises does not stop the
others. A pass that was killed left its mark (``reading``): the passes after it are careful
(:mod:`runs.ingest.quarantine`) until one comes to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import DatabaseError
from django.utils import timezone

from diloco.protocol import keys
from diloco.protocol.records import BadRecord
from diloco.store.base import ListingTooLong, Store, StoreError, StoreUnavailable
from runs.backends import shared_breakers
from runs.ingest.budget import Budget
from runs.ingest.checkpoints import ingest_checkpoints, read_final, store_final
from runs.ingest.journal import mark_due
from runs.ingest.leases import READERS, Leases, read_leases, store_leases
from runs.ingest.quarantine import GuardedStore, OutOfTime, Quarantine
from runs.ingest.rounds import ingest_rounds
from runs.ingest.stores import BoundedStore, store_for
from runs.ingest.telemetry import ingest_telemetry
from runs.ingest.validation import refuse
from runs.metrics.changes import Changes
from runs.models import Event, IngestState, Replica, ReplicaAttempt, Run, TelemetryCursor
from runs.queries.publish import publish_changes
from runs.states import REPLICA_ENDED, RUN_ENDED
from runs.transitions import clean_text, record_event

logger = logging.getLogger(__name__)

STORE_EVENT_EVERY = timedelta(minutes=5)
OBSERVED_STEP_S = 10.0
"""The most that one pass adds to the seconds of observation: when passes were late, or the clock
jumped, replicas were not silent for longer than that."""

KILLED_AGAIN = "the ingest process ended twice before it had read leases and rounds"

Trouble = IngestState.Trouble


@dataclass
class _Pass:
    run: Run
    state: IngestState
    store: Store
    now: datetime
    quarantine: Quarantine
    changes: Changes = field(default_factory=Changes)
    leases: Leases = field(default_factory=lambda: Leases(incarnations=(), newest={}))
    replicas: list[Replica] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    too_long: str = ""
    """Why a listing was too long."""
    found: dict[str, Any] = field(default_factory=dict)
    """Columns of the state, for one write."""

    def __post_init__(self) -> None:
        self.trouble_since = self.state.trouble_since if self.state.trouble else None
        self.guarded = GuardedStore(self.store, self.quarantine)


def ingest_run(run_id: str, *, budget: Budget | None = None) -> bool:
    """One pass. Does not raise for what a bucket holds, nor when it is away. False when the pages
    could not be sent what it stored."""
    run = Run.objects.select_related("owner", "store_credential").get(pk=run_id)
    # Without an attempt nothing in there is this run's, and all of it may be another's.
    if not ReplicaAttempt.objects.filter(replica__run=run).exists():
        return True
    now = timezone.now()
    state = _begin(run, now)
    changes = Changes()
    try:
        store = store_for(run)
        if isinstance(store, BoundedStore):
            store = store.impatient()
        quarantine = Quarantine(run, now=now, careful=state.careful)
        tick = _Pass(run, state, store, now, quarantine, changes=changes)
        _read(tick, budget or Budget())
        _pace_listings(tick)
    except OutOfTime as error:
        logger.warning("run %s: %s; the next pass goes on", run.pk, error)
        _save(state, reading=False, backlog=True)
    except StoreError as error:
        _note_trouble(run, state, error, now)
        _save(state, reading=False)
    except DatabaseError:
        raise  # nothing can be noted; the pass after the next is careful
    except Exception as error:
        logger.exception("run %s: the ingest pass failed", run.pk)
        message = f"{type(error).__name__}: {error}"
        _save(state, reading=False, backlog=True, **_failed_fields(state, message, now))
    if run.state in RUN_ENDED and changes:
        mark_due(run)  # control looks after an ended run only while something is due
    return publish_changes(run, changes)


def has_store_failed(run_id: str) -> str:
    """Why the newest pass could not read the bucket although trying again can help; '' if it
    could. For the circuit breaker of the store."""
    found = IngestState.objects.filter(run_id=run_id, trouble=Trouble.AWAY).values_list("message")
    return str(found[0][0]) if found else ""


def note_open_breaker(run_id: str, message: str) -> None:
    """The store is left alone for a while, because requests of other passes got no answer."""
    run = Run.objects.get(pk=run_id)
    if ReplicaAttempt.objects.filter(replica__run=run).exists():
        state, _ = IngestState.objects.get_or_create(run=run)
        _note_trouble(run, state, StoreUnavailable(message), timezone.now())


def _begin(run: Run, now: datetime) -> IngestState:
    """Count the pass and note that it is under way. After a kill it is careful."""
    state, _ = IngestState.objects.get_or_create(run=run)
    was_killed = state.reading
    if was_killed and not state.careful:
        logger.warning("run %s: the last ingest pass did not end; reading carefully", run.pk)
    # A pass that is careful names the record that ends it. One that is killed all the same was
    # killed by something else, such as a listing too long for its memory.
    more = _failed_fields(state, KILLED_AGAIN, now) if was_killed and state.careful else {}
    state.careful = state.careful or was_killed
    _save(
        state, begun_pass=state.begun_pass + 1, reading=True, careful=state.careful, begun_at=now,
        **more,
    )  # fmt: skip
    return state


def _save(state: IngestState, **fields: Any) -> None:
    """Columns of ingest, which has one writer at a time; control writes others."""
    IngestState.objects.filter(pk=state.pk).update(**fields)
    for name, value in fields.items():
        setattr(state, name, value)


def _read(tick: _Pass, budget: Budget) -> None:
    run, state, now = tick.run, tick.state, tick.now
    tick.replicas = list(run.replicas.select_related("pool", "run").order_by("number"))
    _part(tick, "leases", lambda: _read_leases(tick))
    _part(tick, "rounds", lambda: _read_rounds(tick))
    _part(tick, "final manifest", lambda: _read_final(tick))
    if not tick.failed:
        tick.found |= {"complete_pass": state.begun_pass, "complete_at": now}
        tick.found |= {"trouble": Trouble.NONE, "trouble_since": None, "message": ""}
    _save(state, **tick.found)
    if tick.changes.rounds or run.state in RUN_ENDED:
        _part(tick, "checkpoints", lambda: ingest_checkpoints(run, tick.guarded, now=now))
    whole = _part(tick, "telemetry", lambda: _read_telemetry(tick, budget))
    _part(tick, "sums", lambda: _sum_up(tick))
    caught_up = bool(whole) and not tick.failed
    update: dict[str, Any] = {
        "backlog": not caught_up, "quarantined": tick.quarantine.count, "reading": False,
    }  # fmt: skip
    if any(series == "loss" for series, *_ in tick.changes.points):
        cursors = TelemetryCursor.objects.filter(replica__run=run, nonfinite=True)
        update["nonfinite"] = cursors.exists()
    if caught_up:
        update |= {"caught_up_at": now, "careful": False}
    if tick.failed:
        update |= _trouble_fields(state, Trouble.FAILED, "; ".join(tick.failed), now)
        update["trouble_since"] = tick.trouble_since or now
    _save(state, **update)


def _pace_listings(tick: _Pass) -> None:
    """A long listing holds one of the few slots of its store, so the run's next pass comes later
    and later."""
    place = shared_breakers.prefix_place(str(tick.run.pk))
    if tick.too_long:
        shared_breakers.failed(place, tick.too_long)
    elif shared_breakers.state_of(place).failures:
        shared_breakers.answered(place)


def _part(tick: _Pass, name: str, read: Callable[[], object]) -> object:
    """Run one part. An exception counts against the records in hand; errors of the store end the
    pass."""
    try:
        found = read()
        tick.guarded.settle()
    except ListingTooLong as error:
        tick.too_long = str(error)
        tick.quarantine.hold(error.prefix, str(error))
        tick.failed.append(clean_text(f"{name}: {error}", 500))
        return None
    except StoreError:
        raise
    except Exception as error:
        logger.exception("run %s: ingest of %s failed", tick.run.pk, name)
        tick.guarded.blame(error)
        tick.failed.append(clean_text(f"{name}: {type(error).__name__}: {error}", 500))
        tick.run.refresh_from_db()
        return None
    return found


def _read_leases(tick: _Pass) -> None:
    state, now = tick.state, tick.now
    known = {replica.number: replica.incarnation for replica in tick.replicas}
    careful = tick.quarantine.careful
    store = tick.guarded if careful else tick.store
    tick.leases = read_leases(store, known=known, readers=1 if careful else READERS)
    for replica in tick.replicas:
        if reason := tick.leases.flooded.get(replica.number):
            tick.too_long = reason
            tick.quarantine.hold(keys.member(replica.number), reason, replica=replica)
    since = state.observed_at
    elapsed_s = 0.0 if since is None else (now - since).total_seconds()
    observed_s = state.observed_s + min(max(elapsed_s, 0.0), OBSERVED_STEP_S)
    tick.found |= {"observed_s": observed_s, "observed_at": now}
    tick.changes.replicas |= store_leases(
        tick.run, tick.replicas, tick.leases, now=now, observed_s=observed_s
    )


def _read_rounds(tick: _Pass) -> None:
    """Before telemetry: an evaluation is dated by the tokens of its round."""
    run, state = tick.run, tick.state
    before = run.next_round
    every = ingest_rounds(run, tick.guarded, now=tick.now, changes=tick.changes)
    tick.found["every_round"] = every
    if run.next_round != before or run.first_step_at is None:
        tick.found["progress_s"] = tick.found.get("observed_s", state.observed_s)


def _read_final(tick: _Pass) -> None:
    run = tick.run
    try:
        final = read_final(tick.run, tick.guarded)
    except BadRecord as error:
        refuse(run, keys.FINAL_MANIFEST, error)
        return
    if final is None:
        return
    store_final(run, tick.guarded, final, now=tick.now)
    reason = clean_text(final.reason, 32) or "completed"
    tick.found |= {"final_reason": reason, "final_round": final.round}


def _read_telemetry(tick: _Pass, budget: Budget) -> bool:
    run = tick.run
    open_ids = set(
        ReplicaAttempt.objects.filter(replica__run=run, ended_at=None).values_list(
            "replica_id", flat=True
        )
    )
    # What a job wrote as the last it did is there once its end was recorded before this pass.
    ended = frozenset(r.number for r in tick.replicas if r.pk not in open_ids)
    whole = ingest_telemetry(
        run,
        tick.store,
        tick.replicas,
        tick.leases.incarnations,
        ended=ended,
        now=tick.now,
        changes=tick.changes,
        budget=budget,
        quarantine=tick.quarantine,
    )
    run.refresh_from_db()
    return whole


def _sum_up(tick: _Pass) -> None:
    """Header figures that are made of the replicas' own."""
    live = [r for r in tick.replicas if r.state not in REPLICA_ENDED]
    losses = [r.loss for r in live if r.loss is not None]
    rates = [r.tokens_per_s for r in live if r.tokens_per_s is not None]
    if not tick.changes.replicas or not (losses or rates):
        return
    fields = {
        "train_loss": sum(losses) / len(losses) if losses else tick.run.train_loss,
        "tokens_per_s": sum(rates) if rates else None,
    }
    Run.objects.filter(pk=tick.run.pk).update(**fields)
    for name, value in fields.items():
        setattr(tick.run, name, value)
    tick.changes.run = True


# A bucket that cannot be read.


def _note_trouble(run: Run, state: IngestState, error: StoreError, now: datetime) -> None:
    logger.warning("run %s: the rendezvous could not be read: %s", run.pk, error)
    kind = Trouble.AWAY if isinstance(error, StoreUnavailable) else Trouble.DENIED
    _save(state, backlog=True, **_trouble_fields(state, kind, str(error), now))
    store_event(run, f"the rendezvous could not be read: {error}", now)


def _failed_fields(state: IngestState, message: str, now: datetime) -> dict[str, Any]:
    return _trouble_fields(state, Trouble.FAILED, message, now)


def _trouble_fields(state: IngestState, kind: str, message: str, now: datetime) -> dict[str, Any]:
    since = state.trouble_since if state.trouble else now
    return {"trouble": kind, "trouble_since": since or now, "message": clean_text(message)}


def store_event(run: Run, message: str, now: datetime) -> None:
    """One event in a while, however often the store fails."""
    lately = (now - STORE_EVENT_EVERY, now + STORE_EVENT_EVERY)
    recent = Event.objects.filter(run=run, kind="store", at__range=lately)
    if not recent.filter(message__startswith=message[:40]).exists():
        record_event(run, "store", message, level=Event.Level.WARNING)
