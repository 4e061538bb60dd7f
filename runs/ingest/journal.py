"""The journal: the control plane's records of a run, written into the run's own bucket.

Replicas write rounds, metrics and logs to the bucket. Owner, notes, pools, attempts with causes and
costs, evaluation plans and their jobs, alerts and events exist only in the database. The journal
copies them to ``control/journal/<n>.json``, so that the bucket alone is enough to import the run
(:mod:`runs.restore.journal_reader`).

::

    tick ─► rows that differ from the last written version, and new events ─► one create-once object

A tick writes at most one object, and none if nothing changed. Objects are numbered without gaps. A
row replaces its earlier versions; a deleted evaluation or plan is written with the key ``removed``.
An event can be written twice (if the writer dies before it records the write); readers drop the
duplicate. The journal holds no secrets: credentials are named, and texts pass through
:func:`runs.redaction.clean_text`.

Not in the journal: a replica's progress between two state changes, because it changes at every
tick; the cost of running attempts; and webhook deliveries, which concern this server only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F

from diloco.protocol import keys
from diloco.protocol.group_document import canonical_json
from diloco.protocol.parsing import abridged, parse_json
from diloco.protocol.records import BadRecord
from diloco.store.base import Store
from runs.ingest.commands import TRIES, NoFreeNumber
from runs.ingest.journal_tables import (
    Body,
    alert_body,
    attempt_body,
    evaluation_attempt_body,
    evaluation_body,
    evaluation_name,
    evaluation_plan_body,
    event_body,
    pool_body,
    removed_evaluation_body,
    replica_body,
    run_body,
)
from runs.models import (
    Alert,
    Evaluation,
    EvaluationAttempt,
    EvaluationPlan,
    Event,
    Journal,
    Replica,
    ReplicaAttempt,
    ReplicaPool,
    Run,
)

FORMAT, VERSION = "archipelago.journal", 1
ENTRY_LIMIT = 64 << 20
"""Bytes read of one object. The first has a row for each of up to a thousand replicas."""
EVENTS_PER_OBJECT = 500
RETRY_FIRST, RETRY_CAP = timedelta(seconds=2), timedelta(minutes=5)
"""Delay after the first failed write, and the longest delay."""
WINDOW = 1000
"""Ids below the newest written event that are checked again: a transaction can take an id early and
commit late."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One object. ``pools`` are identified by their position in the run, ``replicas`` by their
    number, ``attempts`` by their launch key, ``evaluation_plans`` by name, ``evaluations`` by plan
    and round, ``alerts`` by kind and subject."""

    n: int
    wall_s: float
    run: Body | None = None
    pools: tuple[Body, ...] = ()
    replicas: tuple[Body, ...] = ()
    attempts: tuple[Body, ...] = ()
    evaluation_plans: tuple[Body, ...] = ()
    evaluations: tuple[Body, ...] = ()
    evaluation_attempts: tuple[Body, ...] = ()
    alerts: tuple[Body, ...] = ()
    events: tuple[Body, ...] = ()

    def to_bytes(self) -> bytes:
        """Empty lists are left out, so that an earlier version reads what it knows."""
        rows = {name: value for name, value in vars(self).items() if value != ()}
        body = {"format": FORMAT, "v": VERSION, **rows}
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
    _add_evaluations(rows, run)
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
        **{name: tuple(new[name]) for name in _LISTS if name != "events"},
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

    def remove_others(self, kind: str, kept: Iterable[str]) -> Iterator[str]:
        """Forget written rows whose name is not in ``kept``, and yield their names."""
        known = self.seen.get(kind, {})
        for name in sorted(set(known) - set(kept)):
            del known[name]
            yield name


def _add_evaluations(rows: _Rows, run: Run) -> None:
    """Add plans, evaluations and their attempts, and those that were deleted."""
    plans = EvaluationPlan.objects.filter(run=run).select_related("credential", "created_by")
    plan_bodies = {plan.name: evaluation_plan_body(plan) for plan in plans.order_by("pk")}
    if not plan_bodies and not rows.seen.get("evaluation_plans"):
        return
    for name, body in plan_bodies.items():
        rows.add("evaluation_plans", name, body)
    for name in rows.remove_others("evaluation_plans", plan_bodies):
        rows.new["evaluation_plans"].append({"name": name, "removed": True})
    evaluations = Evaluation.objects.filter(run=run).select_related("plan").order_by("pk")
    bodies = {evaluation_name(row): evaluation_body(row) for row in evaluations}
    for name, body in bodies.items():
        rows.add("evaluations", name, body)
    for name in rows.remove_others("evaluations", bodies):
        rows.new["evaluations"].append(removed_evaluation_body(name))
    attempts = EvaluationAttempt.objects.filter(evaluation__run=run)
    for attempt in attempts.select_related("evaluation__plan").order_by("pk"):
        rows.add("evaluation_attempts", attempt.launch_key, evaluation_attempt_body(attempt))


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
