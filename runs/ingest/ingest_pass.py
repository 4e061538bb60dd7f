"""One ingest pass over one run: read new objects of its bucket into the tables.

Control (:mod:`runs.reconcile.reconciler`) never reads the bucket. It reads what ingest stored:
heartbeats, rounds, and :class:`~runs.models.IngestState`, which records the last complete pass, the
final manifest, and since when the bucket is unreadable.

Control waits for leases, rounds and the final manifest. They are read first, and a pass that has
read them is *complete*. Telemetry follows until the budget is used up. An exception in one part
does not stop the others. A killed pass leaves ``reading`` set; the following passes are careful
(:mod:`runs.ingest.quarantine`) until one finishes.
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
from runs.bulk import update_row
from runs.ingest.budget import Budget
from runs.ingest.checkpoints import ingest_checkpoints, read_final, store_final
from runs.ingest.journal import mark_due
from runs.ingest.leases import READERS, Leases, read_leases, store_leases
from runs.ingest.quarantine import GuardedStore, PassTimeout, Quarantine
from runs.ingest.rounds import ingest_rounds
from runs.ingest.stores import BoundedStore, store_for
from runs.ingest.telemetry import ingest_telemetry
from runs.ingest.validation import refuse
from runs.metrics.changes import Changes
from runs.models import Event, IngestState, Replica, ReplicaAttempt, Run, TelemetryCursor
from runs.queries.publish import publish_changes
from runs.redaction import clean_text
from runs.states import REPLICA_ENDED, RUN_ENDED
from runs.transitions import record_event

logger = logging.getLogger(__name__)

STORE_EVENT_EVERY = timedelta(minutes=5)
OBSERVED_STEP_S = 10.0
"""Upper bound of observation time that one pass adds. A late pass or a clock jump does not mean
that replicas were silent for longer."""

KILLED_AGAIN = "the ingest process ended twice before it had read leases and rounds"

Trouble = IngestState.Trouble


@dataclass
class _Pass:
    """One pass, and the columns of the ingest state that it sets."""

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
    """Why a listing failed with :class:`ListingTooLong`; empty if none did."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of ``state`` to write in one update."""

    def __post_init__(self) -> None:
        self.trouble_since = self.state.trouble_since if self.state.trouble else None
        self.guarded = GuardedStore(self.store, self.quarantine)

    def read(self, budget: Budget) -> None:
        """Read all parts in order."""
        run, state, now = self.run, self.state, self.now
        self.replicas = list(run.replicas.select_related("pool").order_by("number"))
        self._part("leases", self._read_leases)
        self._part("rounds", self._read_rounds)
        self._part("final manifest", self._read_final)
        if not self.failed:
            self.columns |= {"complete_pass": state.begun_pass, "complete_at": now}
            self.columns |= {"trouble": Trouble.NONE, "trouble_since": None, "message": ""}
        update_row(state, **self.columns)
        if self.changes.rounds or run.state in RUN_ENDED:
            self._part("checkpoints", lambda: ingest_checkpoints(run, self.guarded, now=now))
        is_complete = self._part("telemetry", lambda: self._read_telemetry(budget))
        self._part("sums", self._update_totals)
        caught_up = bool(is_complete) and not self.failed
        update: dict[str, Any] = {
            "backlog": not caught_up,
            "quarantined": self.quarantine.count,
            "reading": False,
        }
        if any(series == "loss" for series, *_ in self.changes.points):
            cursors = TelemetryCursor.objects.filter(replica__run=run, nonfinite=True)
            update["nonfinite"] = cursors.exists()
        if caught_up:
            update |= {"caught_up_at": now, "careful": False}
        if self.failed:
            update |= _trouble_fields(state, Trouble.FAILED, "; ".join(self.failed), now)
            update["trouble_since"] = self.trouble_since or now
        update_row(state, **update)

    def back_off_listings(self) -> None:
        """Back off after a listing that was too long: it occupies one of the store's few slots."""
        breaker_key = shared_breakers.prefix_place(str(self.run.pk))
        if self.too_long:
            shared_breakers.failed(breaker_key, self.too_long)
        elif shared_breakers.state_of(breaker_key).failures:
            shared_breakers.answered(breaker_key)

    def _part(self, name: str, read: Callable[[], object]) -> object:
        """Run one part of the pass.

        An unexpected exception counts against the records being processed. A store error ends the
        pass.
        """
        try:
            result = read()
            self.guarded.settle()
        except ListingTooLong as error:
            self.too_long = str(error)
            self.quarantine.hold(error.prefix, str(error))
            self.failed.append(clean_text(f"{name}: {error}", 500))
            return None
        except StoreError:
            raise
        except Exception as error:
            logger.exception("run %s: ingest of %s failed", self.run.pk, name)
            self.guarded.blame(error)
            self.failed.append(clean_text(f"{name}: {type(error).__name__}: {error}", 500))
            self.run.refresh_from_db()
            return None
        return result

    def _read_leases(self) -> None:
        state, now = self.state, self.now
        known = {replica.number: replica.incarnation for replica in self.replicas}
        careful = self.quarantine.careful
        store = self.guarded if careful else self.store
        self.leases = read_leases(store, known=known, readers=1 if careful else READERS)
        for replica in self.replicas:
            if reason := self.leases.flooded.get(replica.number):
                self.too_long = reason
                self.quarantine.hold(keys.member(replica.number), reason, replica=replica)
        since = state.observed_at
        elapsed_s = 0.0 if since is None else (now - since).total_seconds()
        observed_s = state.observed_s + min(max(elapsed_s, 0.0), OBSERVED_STEP_S)
        self.columns |= {"observed_s": observed_s, "observed_at": now}
        self.changes.replicas |= store_leases(
            self.run, self.replicas, self.leases, now=now, observed_s=observed_s
        )

    def _read_rounds(self) -> None:
        """Rounds come before telemetry: an evaluation takes its token count from its round."""
        run, state = self.run, self.state
        before = run.next_round
        every = ingest_rounds(run, self.guarded, now=self.now, changes=self.changes)
        self.columns["every_round"] = every
        if run.next_round != before or run.first_step_at is None:
            self.columns["progress_s"] = self.columns.get("observed_s", state.observed_s)

    def _read_final(self) -> None:
        run = self.run
        try:
            final = read_final(self.run, self.guarded)
        except BadRecord as error:
            refuse(run, keys.FINAL_MANIFEST, error)
            return
        if final is None:
            return
        store_final(run, self.guarded, final, now=self.now)
        reason = clean_text(final.reason, 32) or "completed"
        self.columns |= {"final_reason": reason, "final_round": final.round}

    def _read_telemetry(self, budget: Budget) -> bool:
        run = self.run
        open_ids = set(
            ReplicaAttempt.objects.filter(replica__run=run, ended_at=None).values_list(
                "replica_id", flat=True
            )
        )
        # A job's last segment is complete if its end was recorded before this pass started.
        ended = frozenset(r.number for r in self.replicas if r.pk not in open_ids)
        is_complete = ingest_telemetry(
            run,
            self.store,
            self.replicas,
            self.leases.incarnations,
            ended=ended,
            now=self.now,
            changes=self.changes,
            budget=budget,
            quarantine=self.quarantine,
        )
        run.refresh_from_db()
        return is_complete

    def _update_totals(self) -> None:
        """Update the run's loss and throughput from those of its live replicas."""
        live = [r for r in self.replicas if r.state not in REPLICA_ENDED]
        losses = [r.loss for r in live if r.loss is not None]
        rates = [r.tokens_per_s for r in live if r.tokens_per_s is not None]
        if not self.changes.replicas or not (losses or rates):
            return
        fields = {
            "train_loss": sum(losses) / len(losses) if losses else self.run.train_loss,
            "tokens_per_s": sum(rates) if rates else None,
        }
        update_row(self.run, **fields)
        self.changes.run = True


def ingest_run(run_id: str) -> bool:
    """Run one pass. Return False if the changes could not be published to the pages.

    Does not raise for the content of a bucket or for an unavailable store.
    """
    run = Run.objects.select_related("owner", "store_credential").get(pk=run_id)
    # Before the first attempt, any object in there belongs to another run.
    if not ReplicaAttempt.objects.filter(replica__run=run).exists():
        return True
    now = timezone.now()
    state = _begin(run, now)
    changes = Changes()
    try:
        store = store_for(run)
        if isinstance(store, BoundedStore):
            store = store.with_record_timeout()
        quarantine = Quarantine(run, now=now, careful=state.careful)
        ingest_pass = _Pass(run, state, store, now, quarantine, changes=changes)
        ingest_pass.read(Budget())
        ingest_pass.back_off_listings()
    except PassTimeout as error:
        logger.warning("run %s: %s; the next pass goes on", run.pk, error)
        update_row(state, reading=False, backlog=True)
    except StoreError as error:
        _note_trouble(run, state, error, now)
        update_row(state, reading=False)
    except DatabaseError:
        raise  # the state cannot be written; the pass after the next one is careful
    except Exception as error:
        logger.exception("run %s: the ingest pass failed", run.pk)
        message = f"{type(error).__name__}: {error}"
        update_row(state, reading=False, backlog=True, **_failed_fields(state, message, now))
    if run.state in RUN_ENDED and changes:
        mark_due(run)  # control visits an ended run only while its journal is due
    return publish_changes(run, changes)


def has_store_failed(run_id: str) -> str:
    """Why the newest pass found the store unavailable (retryable); '' if it was available.

    The store's circuit breaker uses this.
    """
    messages = IngestState.objects.filter(run_id=run_id, trouble=Trouble.AWAY).values_list(
        "message"
    )
    return str(messages[0][0]) if messages else ""


def note_open_breaker(run_id: str, message: str) -> None:
    """Record that no pass runs because the circuit breaker of the store is open."""
    run = Run.objects.get(pk=run_id)
    if ReplicaAttempt.objects.filter(replica__run=run).exists():
        state, _ = IngestState.objects.get_or_create(run=run)
        _note_trouble(run, state, StoreUnavailable(message), timezone.now())


def _begin(run: Run, now: datetime) -> IngestState:
    """Count the pass and mark it as running. After a killed pass this one is careful."""
    state, _ = IngestState.objects.get_or_create(run=run)
    was_killed = state.reading
    if was_killed and not state.careful:
        logger.warning("run %s: the last ingest pass did not end; reading carefully", run.pk)
    # A careful pass has noted the record that kills it. If a careful pass was killed too, the cause
    # is something else, such as a listing that needs too much memory.
    more = _failed_fields(state, KILLED_AGAIN, now) if was_killed and state.careful else {}
    state.careful = state.careful or was_killed
    update_row(
        state,
        begun_pass=state.begun_pass + 1,
        reading=True,
        careful=state.careful,
        begun_at=now,
        **more,
    )
    return state


# Unreadable buckets.


def _note_trouble(run: Run, state: IngestState, error: StoreError, now: datetime) -> None:
    logger.warning("run %s: the rendezvous could not be read: %s", run.pk, error)
    kind = Trouble.AWAY if isinstance(error, StoreUnavailable) else Trouble.DENIED
    update_row(state, backlog=True, **_trouble_fields(state, kind, str(error), now))
    store_event(run, f"the rendezvous could not be read: {error}", now)


def _failed_fields(state: IngestState, message: str, now: datetime) -> dict[str, Any]:
    return _trouble_fields(state, Trouble.FAILED, message, now)


def _trouble_fields(state: IngestState, kind: str, message: str, now: datetime) -> dict[str, Any]:
    since = state.trouble_since if state.trouble else now
    return {"trouble": kind, "trouble_since": since or now, "message": clean_text(message)}


def store_event(run: Run, message: str, now: datetime) -> None:
    """Record at most one such event in five minutes, however often the store fails."""
    lately = (now - STORE_EVENT_EVERY, now + STORE_EVENT_EVERY)
    recent = Event.objects.filter(run=run, kind="store", at__range=lately)
    if not recent.filter(message__startswith=message[:40]).exists():
        record_event(run, "store", message, level=Event.Level.WARNING)
