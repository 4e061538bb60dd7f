"""What only the control plane knows of a run, written into the run's own bucket.

Replicas leave rounds, curves and logs there; owner, notes, pools, attempts with their causes and
costs, alerts and events are in the database alone. They go to ``control/journal/<n>.json``, so that
the bucket tells all of the run (:mod:`runs.restore.journal_reader` reads it back).

::

    tick ─► rows that differ from what was written last, and new events ─► one object, create-once

At most one object per run and tick, and none where nothing changed. Objects are numbered without
gaps. What an object says of a row replaces what earlier ones said; an event that is there twice
(the writer died before it could remember that it had written) is one event. An object holds no
secret: credentials are named, and texts have passed :func:`runs.transitions.clean_text`.

Left out on purpose: what a replica reports of itself between two transitions of its state, because
it would be news at every tick; the cost of what still runs; and what was sent to webhooks, which is
this server's own affair.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, Model

from diloco.protocol import keys
from diloco.protocol.group_document import canonical_json
from diloco.protocol.parsing import abridged, parse_json
from diloco.protocol.records import BadRecord
from diloco.store.base import Store
from runs.ingest.commands import TRIES, Crowded
from runs.models import Alert, Event, Journal, Replica, ReplicaAttempt, ReplicaPool, Run, Webhook
from runs.states import REPLICA_WORKING, RUN_LIVE, ReplicaState

FORMAT, VERSION = "archipelago.journal", 1
ENTRY_LIMIT = 64 << 20
"""Bytes of one object that are read. The first has a row for each replica, up to a thousand."""
EVENTS_PER_OBJECT = 500
RETRY_FIRST, RETRY_CAP = timedelta(seconds=2), timedelta(minutes=5)
"""Between writes that fail."""
WINDOW = 1000
"""Ids below the newest event that was written, among which one may turn up late: its transaction
took its id early and was committed last."""

RUN = (
    "name", "state", "state_reason", "state_since", "submit_key", "time_limit_s", "budget_usd",
    "start_timeout_s", "max_restarts", "notes", "tags", "archived_at", "forked_from", "fork_round",
    "fork_outer", "created_at", "started_at", "first_step_at", "ended_at", "stop_requested_at",
    "stop_sent_at", "cancel_at", "resumed_at", "idle_s", "save_requested_at", "save_sent_at",
)  # fmt: skip
WHEN_NOT_LIVE = ("cost_usd", "train_loss", "tokens_per_s")
"""Of the run: sums over replicas that no longer say how they are."""
POOL = (
    "backend", "hardware", "count", "region", "spot", "image", "timeout_s", "options",
    "price_usd_h", "price_given", "max_price_usd_h", "held", "failures", "closed_until",
    "needs_person", "trouble",
)  # fmt: skip
REPLICA = (
    "number", "backend_state", "restarts", "relaunch_at", "drain_sent_at", "cancel_at",
    "worked_since", "fell_at", "pending_cause", "pending_since", "waiting_since",
)  # fmt: skip
WHEN_NOT_WORKING = ("state", "state_reason", "state_since", "round")
"""Of a replica; one at work says in its beat how it is."""
ATTEMPT = (
    "number", "launch_key", "handle", "cause", "exit_code", "message", "created_at", "launched_at",
    "started_at", "deadline_at", "expires_at", "ended_at", "price_usd_h", "earlier_cost_usd",
)  # fmt: skip
WHEN_ENDED = ("cost_usd", "billed_s")
"""Of an attempt."""
ALERT = (
    "kind", "subject", "level", "message", "first_at", "opened_at", "closed_at", "times", "told_at",
    "acknowledged_at",
)  # fmt: skip
EVENT = ("at", "level", "kind", "from_state", "to_state", "message")

_WORKING = REPLICA_WORKING | {ReplicaState.SUSPECT}

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One object. ``pools`` are told by their place in the run, ``replicas`` by their number,
    ``attempts`` by their launch key, ``alerts`` by kind and subject."""

    n: int
    wall_s: float
    run: Body | None = None
    pools: tuple[Body, ...] = ()
    replicas: tuple[Body, ...] = ()
    attempts: tuple[Body, ...] = ()
    alerts: tuple[Body, ...] = ()
    events: tuple[Body, ...] = ()

    def to_bytes(self) -> bytes:
        body = {"format": FORMAT, "v": VERSION, **vars(self)}
        return json.dumps(body, separators=(",", ":"), allow_nan=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        try:
            body = parse_json(data)
        except ValueError as error:
            raise BadRecord(f"journal: expected JSON, found {error}") from None
        found = (body.pop("format", None), body.pop("v", None)) if isinstance(body, dict) else None
        if found != (FORMAT, VERSION):
            raise BadRecord(
                f"journal: expected {FORMAT} of version {VERSION}, found {abridged(found)}"
            )
        lists: Any = {n: body.pop(n, []) for n in _LISTS}
        if not all(isinstance(v, list) and all(map(_is_body, v)) for v in lists.values()):
            raise BadRecord("journal: expected lists of objects")
        run = body.pop("run", None)
        if not (run is None or _is_body(run)) or set(body) != {"n", "wall_s"}:
            raise BadRecord(
                f"journal: expected n, wall_s and a run, found {abridged(sorted(body))}"
            )
        rows: Any = {name: tuple(found) for name, found in lists.items()}
        return cls(**body, run=run, **rows)


_LISTS = ("pools", "replicas", "attempts", "alerts", "events")


def _is_body(value: object) -> bool:
    return isinstance(value, dict)


def mark_due(run: Run) -> None:
    """Something changed that has to be written. A write that is under way does not clear this."""
    Journal.objects.get_or_create(run=run)
    Journal.objects.filter(run=run).update(due=True, marks=F("marks") + 1)


def has_news(run: Run, *, now: datetime) -> bool:
    """Whether there is something to write, and it is not put off after a failed write."""
    journal = Journal.objects.filter(run=run).defer("seen").first()
    if journal is None:
        return True
    if journal.retry_at is not None and now < journal.retry_at < now + 2 * RETRY_CAP:
        return False
    return journal.due or Event.objects.filter(run=run, pk__gt=journal.event_id).exists()


def put_off(run: Run, *, now: datetime) -> None:
    """A write failed: it stays due and is tried again, less and less often, as long as the run
    exists."""
    journal, _ = Journal.objects.get_or_create(run=run)
    wait = min(RETRY_FIRST * 2 ** min(journal.failures, 12), RETRY_CAP)
    Journal.objects.filter(run=run).update(
        due=True, marks=F("marks") + 1, failures=F("failures") + 1, retry_at=now + wait
    )


def write_journal(run: Run, store: Store, *, now: datetime, changed: bool = True) -> bool:
    """Write what is new of ``run``; False where nothing is. A tick that has not ``changed``
    anything costs two queries."""
    journal, _ = Journal.objects.get_or_create(run=run)
    events = _new_events(run, journal)
    if not (changed or events or journal.due):
        return False
    seen: dict[str, Any] = dict(journal.seen)
    rows = _Rows(seen=seen)
    stored = Run.objects.select_related("owner", "store_credential").get(pk=run.pk)
    rows.add("run", "", run_body(stored))
    places: dict[int, int] = {}
    pools = ReplicaPool.objects.filter(run=run).select_related("credential", "added_by")
    pools = pools.order_by("pk")
    for place, pool in enumerate(pools):
        places[pool.pk] = place
        rows.add("pools", str(place), pool_body(pool, place))
    for replica in Replica.objects.filter(run=run).order_by("number"):
        rows.add("replicas", str(replica.number), replica_body(replica, places))
    attempts = ReplicaAttempt.objects.filter(replica__run=run).select_related("replica")
    for attempt in attempts.order_by("replica__number", "number"):
        rows.add("attempts", attempt.launch_key, attempt_body(attempt))
    alerts = Alert.objects.filter(run=run).select_related("replica", "acknowledged_by")
    for alert in alerts.order_by("pk"):
        rows.add("alerts", f"{alert.kind} {alert.subject}", alert_body(alert))
    new = rows.new
    if not events and not any(new.values()):
        if journal.due:
            _written(journal)
        return False
    entry = Entry(
        n=journal.next_n,
        wall_s=now.timestamp(),
        run=new["run"][0] if new["run"] else None,
        pools=tuple(new["pools"]),
        replicas=tuple(new["replicas"]),
        attempts=tuple(new["attempts"]),
        alerts=tuple(new["alerts"]),
        events=tuple(event_body(event) for event in events),
    )
    n = _create(run, store, entry)
    newest = max([journal.event_id, *(event.pk for event in events)])
    written = [*seen.get("events", ()), *(event.pk for event in events)]
    seen["events"] = [pk for pk in written if pk > newest - WINDOW]
    Journal.objects.filter(pk=run.pk).update(
        next_n=n + 1, event_id=newest, seen=seen, failures=0, retry_at=None
    )
    if len(events) < EVENTS_PER_OBJECT:
        _written(journal)
    else:
        mark_due(run)
    return True


def _written(journal: Journal) -> None:
    """All of it, unless it was marked as due again meanwhile."""
    Journal.objects.filter(pk=journal.pk, marks=journal.marks).update(
        due=False, failures=0, retry_at=None
    )


@dataclass
class _Rows:
    """Rows whose digest is not the one in ``seen``, which is brought up to date."""

    seen: dict[str, Any]
    new: dict[str, list[Body]] = field(
        default_factory=lambda: {"run": [], **{name: [] for name in _LISTS}}
    )

    def add(self, kind: str, name: str, body: Body) -> None:
        digest = hashlib.sha256(canonical_json(_plain(body))).hexdigest()[:16]
        known = self.seen.setdefault(kind, {})
        if known.get(name) != digest:
            known[name] = digest
            self.new[kind].append(body)


def _plain(value: Any) -> Any:
    """For a digest, in which a number may be no number."""
    return json.loads(json.dumps(value), parse_constant=str)


def _new_events(run: Run, journal: Journal) -> list[Event]:
    known = journal.seen.get("events", ())
    events = Event.objects.filter(run=run, pk__gt=journal.event_id - WINDOW).exclude(pk__in=known)
    return list(events.select_related("replica", "actor").order_by("pk")[:EVENTS_PER_OBJECT])


def _create(run: Run, store: Store, entry: Entry) -> int:
    """The number it was written under: the first that is free."""
    for n in range(entry.n, entry.n + TRIES):
        if store.create(keys.journal(n), Entry(**{**vars(entry), "n": n}).to_bytes()):
            return n
    Journal.objects.filter(pk=run.pk).update(next_n=entry.n + TRIES)
    raise Crowded(
        f"expected {keys.journal(entry.n)} or one of the {TRIES} after it to be free, found all "
        "of them taken"
    )


# One row as an object holds it.


def run_body(run: Run) -> Body:
    own = RUN if run.state in RUN_LIVE else (*RUN, *WHEN_NOT_LIVE)
    credential = run.store_credential
    return {
        **_columns(run, own),
        "owner": run.owner.get_username(),
        "store_credential": credential.name if credential else None,
        "archive": run.archive_id,
        "notify": _addresses(run),
    }


def _addresses(run: Run) -> list[str] | None:
    """Webhooks by name, as ids are of one database alone."""
    if run.notify is None:
        return None
    return sorted(Webhook.objects.filter(pk__in=run.notify).values_list("name", flat=True))


def pool_body(pool: ReplicaPool, place: int) -> Body:
    credential = pool.credential.name if pool.credential else None
    added_by = pool.added_by.get_username() if pool.added_by else None
    return {
        **_columns(pool, POOL), "place": place, "credential": credential, "added_by": added_by,
    }  # fmt: skip


def replica_body(replica: Replica, places: Mapping[int, int]) -> Body:
    own = REPLICA if replica.state in _WORKING else (*REPLICA, *WHEN_NOT_WORKING)
    return {**_columns(replica, own), "pool": places[replica.pool_id]}


def attempt_body(attempt: ReplicaAttempt) -> Body:
    own = ATTEMPT if attempt.ended_at is None else (*ATTEMPT, *WHEN_ENDED)
    return {**_columns(attempt, own), "replica": attempt.replica.number}


def alert_body(alert: Alert) -> Body:
    seen_by = alert.acknowledged_by
    return {
        **_columns(alert, ALERT),
        "replica": alert.replica.number if alert.replica else None,
        "acknowledged_by": seen_by.get_username() if seen_by else None,
    }


def event_body(event: Event) -> Body:
    return {
        **_columns(event, EVENT),
        "replica": event.replica.number if event.replica else None,
        "actor": event.actor.get_username() if event.actor else None,
    }


def _columns(row: Model, names: tuple[str, ...]) -> Body:
    return {name: _value(getattr(row, name)) for name in names}


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if value is None or isinstance(value, bool | int | float | list | dict):
        return value
    return str(value)
