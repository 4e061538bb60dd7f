"""Reads the leases of replicas: one listing, then one GET per replica.

A heartbeat is dated by the moment this server saw it change, never by the replica's clock
(invariant I5). Its age counts only the seconds during which ingest read leases (``observed_s``). An
unavailable bucket, a late pass or a clock jump does not make a replica look silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime

from django.db import transaction

from diloco.protocol import keys
from diloco.protocol.records import BadRecord, Heartbeat
from diloco.store.base import (
    LISTED,
    ListingTooLong,
    MissingKey,
    ObjectInfo,
    Store,
    StoreError,
)
from runs.bulk import update_row
from runs.ingest.limits import SMALL_LIMIT, count
from runs.ingest.validation import refuse
from runs.models import Replica, Run
from runs.redaction import clean_text

logger = logging.getLogger(__name__)

READERS = 8
MAX_INCARNATIONS = 256
"""Incarnations of one replica whose telemetry is read; the newest of them if there are more."""
MEMBERS_LISTED = 20_000
"""Objects below ``members/`` that one listing can return. Beyond that each replica is listed alone,
so that a replica that floods its prefix hides only its own lease."""
MEMBER_LISTED = 1_000
"""Objects of one replica's prefix in that case."""
MEMBERS_S = 8.0
"""Seconds for listing replicas one by one."""
MAX_REPLICAS = 4_096
"""Replica numbers whose leases are read. A group has at most a thousand."""
LONGEST_INTERVAL_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Leases:
    """The leases of one pass.

    ``incarnations`` are all that ever had a lease. ``newest`` is each replica's newest heartbeat,
    or the reason why it is unreadable. ``crowded`` maps replicas with too many incarnations to
    their count. ``flooded`` maps replicas whose prefix is too long to list to the error; only their
    known incarnation is read.
    """

    incarnations: tuple[tuple[int, str], ...]
    newest: dict[int, Heartbeat | BadRecord]
    crowded: Mapping[int, int] = field(default_factory=dict)
    flooded: Mapping[int, str] = field(default_factory=dict)


def read_leases(
    store: Store, *, known: Mapping[int, str] | None = None, readers: int = READERS
) -> Leases:
    """Read leases. I/O only, no database.

    ``known`` maps the replicas to read to their newest known incarnation ('' for none). With None
    all replicas are read and a listing that is too long raises.
    """
    names: dict[int, list[str]] = {}
    flooded: dict[int, str] = {}
    try:
        limit = LISTED if known is None else MEMBERS_LISTED
        names = _incarnations(store.list(keys.MEMBERS, limit=limit))
    except ListingTooLong:
        if known is None:
            raise
        names, flooded = _list_each(store, known)
    if known is not None:
        names = {replica: own_names for replica, own_names in names.items() if replica in known}
    names = {replica: names[replica] for replica in sorted(names)[:MAX_REPLICAS]}
    # Incarnations sort by time: the highest name is the newest process.
    incarnations = [(r, name) for r in names for name in sorted(names[r])[-MAX_INCARNATIONS:]]
    newest = {replica: max(incarnations) for replica, incarnations in names.items()}
    if readers > 1:
        with ThreadPoolExecutor(readers) as pool:
            beats = list(pool.map(lambda item: _read(store, *item), newest.items()))
    else:
        beats = [_read(store, *item) for item in newest.items()]
    return Leases(
        incarnations=tuple(incarnations),
        newest={
            replica: beat for replica, beat in zip(newest, beats, strict=True) if beat is not None
        },
        crowded={r: len(name) for r, name in names.items() if len(name) > MAX_INCARNATIONS},
        flooded=flooded,
    )


def _incarnations(listed: Iterable[ObjectInfo]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for info in listed:
        if parsed := keys.parse_beat(info.key):
            names.setdefault(parsed[0], []).append(parsed[1])
    return names


def _list_each(
    store: Store, known: Mapping[int, str]
) -> tuple[dict[int, list[str]], dict[int, str]]:
    """List replicas one by one: their incarnations, and the replicas whose listing is too long.

    For those, and when the time is used up, the known incarnation is returned.
    """
    names: dict[int, list[str]] = {}
    flooded: dict[int, str] = {}
    until_s = time.monotonic() + MEMBERS_S
    for replica, newest in sorted(known.items())[:MAX_REPLICAS]:
        names[replica] = [newest] if newest else []
        if time.monotonic() > until_s:
            continue
        try:
            listed = store.list(keys.member(replica), limit=MEMBER_LISTED)
        except ListingTooLong as error:
            flooded[replica] = str(error)
        else:
            names[replica] = _incarnations(listed).get(replica, [])
    return {replica: own_names for replica, own_names in names.items() if own_names}, flooded


def _read(store: Store, replica: int, incarnation: str) -> Heartbeat | BadRecord | None:
    try:
        beat = Heartbeat.read(store, keys.beat(replica, incarnation))
        if (beat.replica, beat.incarnation) != (replica, incarnation):
            raise BadRecord("expected the lease of its own key, found another's")
        if not 0 <= beat.interval_s <= LONGEST_INTERVAL_S:
            raise BadRecord(
                f"interval_s: expected 0 to {LONGEST_INTERVAL_S:g}, found {beat.interval_s}"
            )
        for name in ("round", "pid"):
            count(getattr(beat, name), name, limit=SMALL_LIMIT)
        for name in ("count", "step", "tokens"):
            count(getattr(beat, name), name)
    except MissingKey:
        return None
    except BadRecord as error:
        return error
    except StoreError:
        raise
    except Exception as error:  # one bad record must not hide the other replicas
        return BadRecord(f"{type(error).__name__}: {error}")
    return beat


def store_leases(
    run: Run,
    replicas: Sequence[Replica],
    leases: Leases,
    *,
    now: datetime,
    observed_s: float = 0.0,
) -> bool:
    """Write changed heartbeats to the replicas' rows; return whether there was one."""
    changed = False
    for replica in replicas:
        beat = leases.newest.get(replica.number)
        if replica.number in leases.crowded:
            error = BadRecord(
                f"expected at most {MAX_INCARNATIONS}, found {leases.crowded[replica.number]}"
            )
            refuse(run, f"incarnations of {replica}", error, replica=replica)
        if isinstance(beat, BadRecord):
            refuse(run, f"lease of {replica}", beat, replica=replica)
            beat = None
        if beat is None or beat.incarnation < replica.incarnation:
            continue
        if (beat.incarnation, beat.count) == (replica.incarnation, replica.beat_count):
            continue
        try:
            _save(replica, beat, now, observed_s)
        except Exception as error:  # one bad record must not hide the other replicas
            logger.exception("the lease of %s could not be stored", replica)
            refuse(run, f"lease of {replica}", error, replica=replica)
        else:
            changed = True
    return changed


def _save(replica: Replica, beat: Heartbeat, now: datetime, observed_s: float) -> None:
    with transaction.atomic():
        update_row(
            replica,
            incarnation=clean_text(beat.incarnation, 16),
            beat_count=beat.count,
            beat_at=now,
            beat_interval_s=beat.interval_s,
            beat_state=clean_text(beat.state, 16),
            beat_message=clean_text(beat.message),
            beat_observed_s=observed_s,
            round=beat.round,
            device=clean_text(beat.device, 80),
            host=clean_text(beat.host, 120),
            pid=beat.pid,
        )
