"""Reads a run's journal: the newest version of each row, and every event once, in order.

Objects are numbered without gaps, so a missing or unreadable one is a loss; later ones are still
read. Required and optional fields are checked here, columns when rows are created
(:mod:`runs.restore.columns`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.protocol import keys
from diloco.protocol.parsing import abridged, check_storable
from diloco.protocol.records import BadRecord
from diloco.store.base import MissingKey, NotAnObject, ObjectTooLarge, Store
from runs.ingest.journal import ENTRY_LIMIT, Entry
from runs.ingest.journal_tables import Body

REPLICA_LIMIT = 99_999

_REQUIRED: Mapping[str, Mapping[str, type]] = {
    "run": {"name": str, "state": str, "state_since": str, "created_at": str},
    "pools": {"place": int, "backend": str, "count": int},
    "replicas": {"number": int, "pool": int},
    "attempts": {"launch_key": str, "number": int, "replica": int, "created_at": str},
    "evaluation_plans": {"name": str, "spec": dict, "backend": str, "created_at": str},
    "evaluations": {"plan": str, "round": int, "state": str, "created_at": str},
    "evaluation_attempts": {
        "launch_key": str,
        "plan": str,
        "round": int,
        "number": int,
        "created_at": str,
    },
    "alerts": {"kind": str, "subject": str},
    "events": {"at": str, "kind": str},
}
_REMOVED: Mapping[str, Mapping[str, type]] = {
    "evaluation_plans": {"name": str},
    "evaluations": {"plan": str, "round": int},
}
"""Fields of a row that was deleted."""
_OPTIONAL: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "run": {"owner": (str,), "store_credential": (str,), "archive": (str,), "notify": (list,)},
    "pools": {"credential": (str,), "added_by": (str,)},
    "evaluation_plans": {"credential": (str,), "created_by": (str,)},
    "alerts": {"replica": (int,), "acknowledged_by": (str,)},
    "events": {"replica": (int,), "actor": (str,)},
}


@dataclass
class JournalState:
    """The merged journal. ``refused`` names the objects that are missing or unreadable, with the
    reason."""

    run: Body = field(default_factory=dict)
    pools: dict[int, Body] = field(default_factory=dict)
    replicas: dict[int, Body] = field(default_factory=dict)
    attempts: dict[str, Body] = field(default_factory=dict)
    evaluation_plans: dict[str, Body] = field(default_factory=dict)
    evaluations: dict[tuple[str, int], Body] = field(default_factory=dict)
    evaluation_attempts: dict[str, Body] = field(default_factory=dict)
    alerts: dict[tuple[str, str], Body] = field(default_factory=dict)
    events: list[Body] = field(default_factory=list)
    next_n: int = 1
    refused: list[str] = field(default_factory=list)


def read_journal(store: Store) -> JournalState:
    """Read all objects up to the highest number in the bucket."""
    result = JournalState()
    known: set[str] = set()
    pages = store.list_pages(keys.JOURNAL)
    listed = {keys.parse_journal(info.key) for page in pages for info in page} - {None, 0}
    for n in sorted(n for n in listed if n):
        if n > result.next_n:
            result.refused.append(missing(keys.journal(result.next_n), keys.journal(n - 1)))
        result.next_n = n + 1
        key = keys.journal(n)
        try:
            entry = _read(store, key, n)
        except MissingKey:
            result.refused.append(missing(key, key))
        except BadRecord as error:
            result.refused.append(f"{key}: {error}")
        else:
            _add(result, known, entry)
    return result


def missing(first: str, last: str) -> str:
    """A message about missing numbered objects, from one key to another."""
    if first == last:
        return f"{first}: expected an object, found none"
    return f"{first} to {last}: expected objects, found none"


def _read(store: Store, key: str, n: int) -> Entry:
    try:
        entry = Entry.from_bytes(store.get(key, limit=ENTRY_LIMIT))
    except ObjectTooLarge as error:
        raise BadRecord(f"journal: expected at most {error.limit} bytes, found more") from None
    except NotAnObject as error:
        raise BadRecord(f"journal: {error}") from None
    if entry.n != n:
        raise BadRecord(f"journal: expected object {n}, found {abridged(entry.n)}")
    for kind in _REQUIRED:
        bodies = getattr(entry, kind)
        for body in ([bodies] if bodies else ()) if kind == "run" else bodies:
            _check(kind, body)
    return entry


def _check(kind: str, body: Body) -> None:
    try:
        check_storable(body, f"journal: {kind}")
    except ValueError as error:
        raise BadRecord(str(error)) from None
    is_removed = kind in _REMOVED and body.get("removed") is True
    for name, wanted in (_REMOVED if is_removed else _REQUIRED)[kind].items():
        if not _is(body.get(name), (wanted,)):
            found = abridged(body[name]) if name in body else "none"
            raise BadRecord(f"journal: {kind}.{name}: expected {wanted.__name__}, found {found}")
    for name, allowed in _OPTIONAL.get(kind, {}).items():
        if body.get(name) is not None and not _is(body[name], allowed):
            raise BadRecord(
                f"journal: {kind}.{name}: expected {allowed[0].__name__}, "
                f"found {abridged(body[name])}"
            )
    number = body.get("number", 0) if kind == "replicas" else body.get("replica") or 0
    if not 0 <= number <= REPLICA_LIMIT:
        raise BadRecord(
            f"journal: {kind}: expected a replica from 0 to {REPLICA_LIMIT}, found {number}"
        )


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _add(result: JournalState, known: set[str], entry: Entry) -> None:
    result.run = entry.run or result.run
    result.pools |= {body["place"]: body for body in entry.pools}
    result.replicas |= {body["number"]: body for body in entry.replicas}
    result.attempts |= {body["launch_key"]: body for body in entry.attempts}
    _update(result.evaluation_plans, {b["name"]: b for b in entry.evaluation_plans})
    _update(result.evaluations, {(b["plan"], b["round"]): b for b in entry.evaluations})
    result.evaluation_attempts |= {b["launch_key"]: b for b in entry.evaluation_attempts}
    result.alerts |= {(body["kind"], body["subject"]): body for body in entry.alerts}
    for event in entry.events:
        name = json.dumps(event, sort_keys=True)
        if name not in known:
            known.add(name)
            result.events.append(event)


def _update(rows: dict[Any, Body], changes: Mapping[Any, Body]) -> None:
    for key, body in changes.items():
        if body.get("removed") is True:
            rows.pop(key, None)
        else:
            rows[key] = body
