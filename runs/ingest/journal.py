"""The journal: the control plane's records of a run, written into the run's own bucket.

Replicas write rounds, metrics and logs to the bucket. Owner, notes, pools, attempts with causes and
costs, alerts and events exist only in the database. The journal copies them to
``control/journal/<n>.json``, so that the bucket alone is enough to import the run
(:mod:`runs.restore.journal_reader`).

::

    tick ─► rows that differ from the last written version, and new events ─► one create-once object

A tick writes at most one object, and none if nothing changed. Objects are numbered without gaps. A
row replaces its earlier versions. An event can be written twice (if the writer dies before it
records the write); readers drop the duplicate. The journal holds no secrets: credentials are named,
and texts pass through :func:`runs.transitions.clean_text`.

Not in the journal: a replica's progress between two state changes, because it changes at every
tick; the cost of running attempts; and webhook deliveries, which concern this server only.
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
from runs.ingest.commands import TRIES, NoFreeNumber
from runs.models import Alert, Event, Journal, Replica, ReplicaAttempt, ReplicaPool, Run, Webhook
from runs.states import REPLICA_WORKING, RUN_LIVE, ReplicaState

FORMAT, VERSION = "archipelago.journal", 1
ENTRY_LIMIT = 64 << 20
"""Bytes read of one object. The first has a row for each of up to a thousand replicas."""
EVENTS_PER_OBJECT = 500
RETRY_FIRST, RETRY_CAP = timedelta(seconds=2), timedelta(minutes=5)
"""Delay after the first failed write, and the longest delay."""
WINDOW = 1000
"""Ids below the newest written event that are checked again: a transaction can take an id early and
commit late."""


Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The columns of a model that the journal contains, under the same names.

    These are all columns except keys, relations (a body names those differently) and ``omitted``.
    ``final`` columns are left out while the row is still changing at every tick.
    """

    model: type[Model]
    omitted: frozenset[str] = frozenset()
    final: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(
            field.name
            for field in self.model._meta.concrete_fields
            if not (field.primary_key or field.is_relation or field.name in self.omitted)
        )

    def body(self, row: Model, *, final: bool = True) -> Body:
        names = (name for name in self.columns if final or name not in self.final)
        return {STORED_AS.get(name, name): _value(getattr(row, name)) for name in names}


STORED_AS = {
    "open_until": "closed_until",
    "requires_intervention": "needs_person",
    "last_error": "trouble",
    "notified_at": "told_at",
}
"""Keys of the journal that differ from the column. Keys change only with :data:`VERSION`."""

_FROM_BUCKET = {
    *("rendezvous", "group_settings", "workload", "group_fingerprint", "code_sha256", "model_hash"),
    *("committed_rounds", "tokens", "eval_loss", "eval_round", "round_s", "bytes_up", "bytes_down"),
    *("requests", "phase_s", "refused_records", "next_round", "next_command"),
}
"""Columns of a run that an import reads from other objects of its bucket."""
_LOCAL = {
    *("delete_requested_at", "delete_objects", "last_seen_at", "committed_at"),
    *("published_event_id", "end_due", "watched_round", "notify"),
}
"""Columns of a run that concern one server or database only."""
_REPORTED = {
    *("incarnation", "beat_count", "beat_at", "beat_interval_s", "beat_state", "beat_message"),
    *("beat_observed_s", "beat_judged", "step", "tokens", "loss", "tokens_per_s", "wait_fraction"),
    *("gpu_busy", "gpu_memory_bytes", "up_bytes_per_s", "down_bytes_per_s"),
    *("device", "host", "pid"),
}
"""Columns of a replica that its heartbeats and telemetry set."""

RUN = Table(
    model=Run,
    omitted=frozenset(_FROM_BUCKET | _LOCAL),
    final=("cost_usd", "train_loss", "tokens_per_s"),  # sums over reporting replicas
)
POOL = Table(model=ReplicaPool)
REPLICA = Table(
    model=Replica,
    omitted=frozenset(_REPORTED),
    final=("state", "state_reason", "state_since", "round"),  # in the heartbeat while it works
)
ATTEMPT = Table(model=ReplicaAttempt, final=("cost_usd", "billed_s"))
ALERT = Table(model=Alert)
EVENT = Table(model=Event)

_WORKING = REPLICA_WORKING | {ReplicaState.SUSPECT}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One object. ``pools`` are identified by their position in the run, ``replicas`` by their
    number, ``attempts`` by their launch key, ``alerts`` by kind and subject."""

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


_LISTS = tuple(name for name, kind in Entry.__annotations__.items() if "tuple" in kind)


def _is_body(value: object) -> bool:
    return isinstance(value, dict)


def mark_due(run: Run) -> None:
    """Mark the journal as due. A write that is already running does not clear this mark."""
    Journal.objects.get_or_create(run=run)
    Journal.objects.filter(run=run).update(due=True, marks=F("marks") + 1)


def is_write_due(run: Run, *, now: datetime) -> bool:
    """Whether there is something to write and no retry delay is running."""
    journal = Journal.objects.filter(run=run).defer("seen").first()
    if journal is None:
        return True
    if journal.retry_at is not None and now < journal.retry_at < now + 2 * RETRY_CAP:
        return False
    return journal.due or Event.objects.filter(run=run, pk__gt=journal.event_id).exists()


def delay_retry(run: Run, *, now: datetime) -> None:
    """Record a failed write. It stays due and is retried with exponential backoff, without
    limit."""
    journal, _ = Journal.objects.get_or_create(run=run)
    wait = min(RETRY_FIRST * 2 ** min(journal.failures, 12), RETRY_CAP)
    Journal.objects.filter(run=run).update(
        due=True, marks=F("marks") + 1, failures=F("failures") + 1, retry_at=now + wait
    )


def write_journal(run: Run, store: Store, *, now: datetime, changed: bool = True) -> bool:
    """Write the changes of ``run``; return False if there are none.

    A tick with ``changed=False`` and nothing due costs two queries.
    """
    journal, _ = Journal.objects.get_or_create(run=run)
    events = _new_events(run, journal)
    if not (changed or events or journal.due):
        return False
    seen: dict[str, Any] = dict(journal.seen)
    rows = _Rows(seen=seen)
    stored = Run.objects.select_related("owner", "store_credential").get(pk=run.pk)
    rows.add("run", "", run_body(stored))
    positions: dict[int, int] = {}
    pools = ReplicaPool.objects.filter(run=run).select_related("credential", "added_by")
    pools = pools.order_by("pk")
    for position, pool in enumerate(pools):
        positions[pool.pk] = position
        rows.add("pools", str(position), pool_body(pool, position))
    for replica in Replica.objects.filter(run=run).order_by("number"):
        rows.add("replicas", str(replica.number), replica_body(replica, positions))
    attempts = ReplicaAttempt.objects.filter(replica__run=run).select_related("replica")
    for attempt in attempts.order_by("replica__number", "number"):
        rows.add("attempts", attempt.launch_key, attempt_body(attempt))
    alerts = Alert.objects.filter(run=run).select_related("replica", "acknowledged_by")
    for alert in alerts.order_by("pk"):
        rows.add("alerts", f"{alert.kind} {alert.subject}", alert_body(alert))
    new = rows.new
    if not events and not any(new.values()):
        if journal.due:
            _mark_written(journal)
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
        _mark_written(journal)
    else:
        mark_due(run)
    return True


def _mark_written(journal: Journal) -> None:
    """Clear the due mark, unless the journal was marked again in the meantime."""
    Journal.objects.filter(pk=journal.pk, marks=journal.marks).update(
        due=False, failures=0, retry_at=None
    )


@dataclass
class _Rows:
    """Collects rows whose digest differs from the one in ``seen``, and updates ``seen``."""

    seen: dict[str, Any]
    new: dict[str, list[Body]] = field(
        default_factory=lambda: {"run": [], **{name: [] for name in _LISTS}}
    )

    def add(self, kind: str, name: str, body: Body) -> None:
        digest = hashlib.sha256(canonical_json(_without_nan(body))).hexdigest()[:16]
        known = self.seen.setdefault(kind, {})
        if known.get(name) != digest:
            known[name] = digest
            self.new[kind].append(body)


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities by strings, so that the value has a digest."""
    return json.loads(json.dumps(value), parse_constant=str)


def _new_events(run: Run, journal: Journal) -> list[Event]:
    known = journal.seen.get("events", ())
    events = Event.objects.filter(run=run, pk__gt=journal.event_id - WINDOW).exclude(pk__in=known)
    return list(events.select_related("replica", "actor").order_by("pk")[:EVENTS_PER_OBJECT])


def _create(run: Run, store: Store, entry: Entry) -> int:
    """Write the entry under the first free number and return that number."""
    for n in range(entry.n, entry.n + TRIES):
        if store.create(keys.journal(n), Entry(**{**vars(entry), "n": n}).to_bytes()):
            return n
    Journal.objects.filter(pk=run.pk).update(next_n=entry.n + TRIES)
    raise NoFreeNumber(
        f"expected {keys.journal(entry.n)} or one of the {TRIES} after it to be free, found all "
        "of them taken"
    )


# Rows as they are stored in an entry.


def run_body(run: Run) -> Body:
    credential = run.store_credential
    return {
        **RUN.body(run, final=run.state not in RUN_LIVE),
        "owner": run.owner.get_username(),
        "store_credential": credential.name if credential else None,
        "archive": run.archive_id,
        "notify": _webhook_names(run),
    }


def _webhook_names(run: Run) -> list[str] | None:
    """Webhooks by name: ids are valid in one database only."""
    if run.notify is None:
        return None
    return sorted(Webhook.objects.filter(pk__in=run.notify).values_list("name", flat=True))


def pool_body(pool: ReplicaPool, position: int) -> Body:
    credential = pool.credential.name if pool.credential else None
    added_by = pool.added_by.get_username() if pool.added_by else None
    return {
        **POOL.body(pool),
        "place": position,
        "credential": credential,
        "added_by": added_by,
    }


def replica_body(replica: Replica, positions: Mapping[int, int]) -> Body:
    body = REPLICA.body(replica, final=replica.state not in _WORKING)
    return {**body, "pool": positions[replica.pool_id]}


def attempt_body(attempt: ReplicaAttempt) -> Body:
    body = ATTEMPT.body(attempt, final=attempt.ended_at is not None)
    return {**body, "replica": attempt.replica.number}


def alert_body(alert: Alert) -> Body:
    seen_by = alert.acknowledged_by
    return {
        **ALERT.body(alert),
        "replica": alert.replica.number if alert.replica else None,
        "acknowledged_by": seen_by.get_username() if seen_by else None,
    }


def event_body(event: Event) -> Body:
    return {
        **EVENT.body(event),
        "replica": event.replica.number if event.replica else None,
        "actor": event.actor.get_username() if event.actor else None,
    }


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if value is None or isinstance(value, bool | int | float | list | dict):
        return value
    return str(value)
