"""Leases as the control plane sees them: one listing, one GET per replica.

A beat is judged by when *we* saw it change, never by what it says the time is (invariant I5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from diloco.rendezvous import keys
from diloco.rendezvous.records import BadRecord, Beat
from diloco.rendezvous.store import MissingKey, Store
from runs.bucket.limits import SMALL_LIMIT, count
from runs.bucket.reading import refuse
from runs.control.decide import BeatView
from runs.models import Replica, Run
from runs.transitions import clean_text

READERS = 8


@dataclass(frozen=True, kw_only=True)
class Leases:
    """``incarnations`` are all that ever beat; ``newest`` the beat of each replica's newest, or
    why it could not be read."""

    incarnations: tuple[tuple[int, str], ...]
    newest: dict[int, Beat | BadRecord]


def read_leases(store: Store) -> Leases:
    """I/O only."""
    found = [p for info in store.list(keys.MEMBERS) if (p := keys.parse_beat(info.key))]
    newest: dict[int, str] = {}
    for replica, incarnation in found:
        newest[replica] = max(incarnation, newest.get(replica, ""))
    with ThreadPoolExecutor(READERS) as pool:
        beats = pool.map(lambda item: _read(store, *item), newest.items())
    return Leases(
        incarnations=tuple(found),
        newest={
            replica: beat for replica, beat in zip(newest, beats, strict=True) if beat is not None
        },
    )


def _read(store: Store, replica: int, incarnation: str) -> Beat | BadRecord | None:
    try:
        beat = Beat.read(store, keys.beat(replica, incarnation))
        if (beat.replica, beat.incarnation) != (replica, incarnation):
            raise BadRecord("expected the lease of its own key, found another's")
        if not math.isfinite(beat.interval_s):
            raise BadRecord(f"interval_s: expected a finite number, found {beat.interval_s}")
        for name in ("round", "pid"):
            count(getattr(beat, name), name, limit=SMALL_LIMIT)
        for name in ("count", "step", "tokens"):
            count(getattr(beat, name), name)
    except MissingKey:
        return None
    except BadRecord as error:
        return error
    return beat


def store_leases(
    run: Run, replicas: Sequence[Replica], leases: Leases, *, now: datetime
) -> dict[int, BeatView]:
    """Write what changed to the replicas' rows; replica number -> what to judge it by."""
    views: dict[int, BeatView] = {}
    for replica in replicas:
        beat = leases.newest.get(replica.number)
        if isinstance(beat, BadRecord):
            refuse(run, f"lease of {replica}", beat, replica=replica)
            beat = None
        if beat is None or beat.incarnation < replica.incarnation:
            continue
        changed = (beat.incarnation, beat.count) != (replica.incarnation, replica.beat_count)
        if changed:
            _save(replica, beat, now)
        since = replica.beat_at or now
        views[replica.number] = BeatView(
            changed=changed,
            state=beat.state,
            message=clean_text(beat.message),
            interval_s=beat.interval_s,
            age_s=(now - since).total_seconds(),
        )
    return views


def _save(replica: Replica, beat: Beat, now: datetime) -> None:
    fields: dict[str, Any] = {
        "incarnation": beat.incarnation,
        "beat_count": beat.count,
        "beat_at": now,
        "beat_interval_s": beat.interval_s,
        "round": beat.round,
        "device": clean_text(beat.device, 80),
        "host": clean_text(beat.host, 120),
        "pid": beat.pid,
    }
    Replica.objects.filter(pk=replica.pk).update(**fields)
    for name, value in fields.items():
        setattr(replica, name, value)
