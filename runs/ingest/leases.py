"""Leases of replicas: one listing, one GET per replica.

A beat is judged by when *we* saw it change, never by what it says the time is (invariant I5). Its
age is counted in seconds during which ingest has read leases (``observed_s``): while the bucket is
away, while ingest is late, and when the clock jumps, no replica grows silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import transaction

from diloco.protocol import keys
from diloco.protocol.records import BadRecord, Beat
from diloco.store.base import (
    LISTED,
    ListingTooLong,
    MissingKey,
    ObjectInfo,
    Store,
    StoreError,
)
from runs.ingest.limits import SMALL_LIMIT, count
from runs.ingest.validation import refuse
from runs.models import Replica, Run
from runs.transitions import clean_text

logger = logging.getLogger(__name__)

READERS = 8
MAX_INCARNATIONS = 256
"""Processes of one replica whose telemetry is read; of more, the newest."""
MEMBERS_LISTED = 20_000
"""Objects below ``members/`` that one listing may have: more, and each replica is listed alone, so
that a replica that floods its folder hides its own lease and no other's."""
MEMBER_LISTED = 1_000
"""Objects of one replica's folder that are listed then."""
MEMBERS_S = 8.0
"""Seconds after which no more replicas are listed alone."""
MAX_REPLICAS = 4_096
"""Replica numbers whose leases are read; a group has a thousand at most."""
LONGEST_INTERVAL_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Leases:
    """``incarnations`` are all that ever beat; ``newest`` the beat of each replica's newest, or
    why it could not be read. ``crowded`` are replicas with more incarnations than are read, and how
    many they have. ``flooded`` are those whose folder holds too many objects to be listed, and why
    it was not: of these only the process that was known is read."""

    incarnations: tuple[tuple[int, str], ...]
    newest: dict[int, Beat | BadRecord]
    crowded: Mapping[int, int] = field(default_factory=dict)
    flooded: Mapping[int, str] = field(default_factory=dict)


def read_leases(
    store: Store, *, known: Mapping[int, str] | None = None, readers: int = READERS
) -> Leases:
    """I/O only. Of the replicas ``known``, with the newest incarnation of each that was seen ('' if
    none was); None is of all, and then a listing that is too long is an error."""
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
        names = {replica: found for replica, found in names.items() if replica in known}
    names = {replica: names[replica] for replica in sorted(names)[:MAX_REPLICAS]}
    # Sorted by time: of two processes of a replica the higher name is the newer.
    found = [(r, name) for r in names for name in sorted(names[r])[-MAX_INCARNATIONS:]]
    newest = {replica: max(incarnations) for replica, incarnations in names.items()}
    if readers > 1:
        with ThreadPoolExecutor(readers) as pool:
            beats = list(pool.map(lambda item: _read(store, *item), newest.items()))
    else:
        beats = [_read(store, *item) for item in newest.items()]
    return Leases(
        incarnations=tuple(found),
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
    store: Store, known: Mapping[int, str], *, clock: Callable[[], float] = time.monotonic
) -> tuple[dict[int, list[str]], dict[int, str]]:
    """The incarnations of each replica, listed one by one, and the replicas whose listing is too
    long. Of these, and of those that there was no time for, the incarnation that is known."""
    names: dict[int, list[str]] = {}
    flooded: dict[int, str] = {}
    until_s = clock() + MEMBERS_S
    for replica, newest in sorted(known.items())[:MAX_REPLICAS]:
        names[replica] = [newest] if newest else []
        if clock() > until_s:
            continue
        try:
            listed = store.list(keys.member(replica), limit=MEMBER_LISTED)
        except ListingTooLong as error:
            flooded[replica] = str(error)
        else:
            names[replica] = _incarnations(listed).get(replica, [])
    return {replica: found for replica, found in names.items() if found}, flooded


def _read(store: Store, replica: int, incarnation: str) -> Beat | BadRecord | None:
    try:
        beat = Beat.read(store, keys.beat(replica, incarnation))
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
    except Exception as error:  # of one replica; the others are read
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
    """Write the beats that changed to the replicas' rows; whether there was one."""
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
        except Exception as error:  # one replica's record must not hide the leases of the others
            logger.exception("the lease of %s could not be stored", replica)
            refuse(run, f"lease of {replica}", error, replica=replica)
        else:
            changed = True
    return changed


def _save(replica: Replica, beat: Beat, now: datetime, observed_s: float) -> None:
    fields: dict[str, Any] = {
        "incarnation": clean_text(beat.incarnation, 16),
        "beat_count": beat.count,
        "beat_at": now,
        "beat_interval_s": beat.interval_s,
        "beat_state": clean_text(beat.state, 16),
        "beat_message": clean_text(beat.message),
        "beat_observed_s": observed_s,
        "round": beat.round,
        "device": clean_text(beat.device, 80),
        "host": clean_text(beat.host, 120),
        "pid": beat.pid,
    }
    with transaction.atomic():
        Replica.objects.filter(pk=replica.pk).update(**fields)
    for name, value in fields.items():
        setattr(replica, name, value)
