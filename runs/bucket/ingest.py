"""Telemetry segments into tables, exactly once.

A cursor per incarnation holds the number of the next segment: GET it until it is not there. What a
batch of segments says and the cursor's move are one transaction under ``WHERE next_n = n``; a
worker that dies before the commit leaves nothing, one that lost a race stores nothing. A segment
that cannot be read is refused, named and counted, and the cursor passes it.

Reading (in threads, no database) is apart from storing: one transaction for all cursors of a tick,
because a transaction of each costs as much, and is most of a tick that finds a segment or two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F

from diloco.rendezvous import keys
from diloco.rendezvous.records import BadRecord
from diloco.rendezvous.store import MissingKey, Store
from diloco.rendezvous.telemetry import Segment
from runs.bucket.reading import SMALL_LIMIT, Changes, count, refuse
from runs.bucket.segments import store_segments
from runs.models import Replica, Run, TelemetryCursor
from runs.series.blocks import MAX_KEY

SEGMENTS_PER_TICK = 40
"""Per incarnation: a backlog is worked off over several ticks, not in one that lasts for ever."""
SEGMENT_LIMIT = 16 * 1024 * 1024
"""Bytes; a replica's are a few hundred thousand at most. A larger one is not read to its end."""
READERS = 8
STALE_AFTER = timedelta(seconds=60)
"""A superseded incarnation that wrote nothing for so long is not asked any more."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive segments of one incarnation; an unreadable one is its error.
    ``drained``: the next was not there."""

    cursor: TelemetryCursor
    segments: tuple[tuple[int, Segment | BadRecord], ...]
    drained: bool

    @property
    def good(self) -> list[Segment]:
        return [segment for _, segment in self.segments if isinstance(segment, Segment)]

    @property
    def bad(self) -> list[tuple[int, BadRecord]]:
        return [(n, error) for n, error in self.segments if isinstance(error, BadRecord)]


def ingest_telemetry(
    run: Run,
    store: Store,
    replicas: Sequence[Replica],
    incarnations: Iterable[tuple[int, str]],
    *,
    ended: frozenset[int],
    now: datetime,
    changes: Changes,
) -> None:
    """Read what is new of every known incarnation. ``ended`` are the numbers of replicas without
    a job that may still write."""
    by_number = {r.number: r for r in replicas}
    cursors = _open_cursors(run, by_number, incarnations, now)
    if not cursors:
        return
    with ThreadPoolExecutor(READERS) as pool:
        batches = list(pool.map(lambda cursor: read_batch(store, cursor), cursors))
    newest: dict[int, str] = {}
    for cursor in TelemetryCursor.objects.filter(replica__run=run).select_related("replica"):
        number = cursor.replica.number
        newest[number] = max(newest.get(number, ""), cursor.incarnation)
    stored = store_batches(run, [b for b in batches if b.segments], now=now, changes=changes)
    for batch in batches:
        replica = batch.cursor.replica
        if batch.cursor.pk in stored:
            continue
        superseded = batch.cursor.incarnation < newest[replica.number]
        stale = superseded and now - batch.cursor.moved_at > STALE_AFTER
        if batch.drained and not batch.segments and (replica.number in ended or stale):
            TelemetryCursor.objects.filter(pk=batch.cursor.pk, next_n=batch.cursor.next_n).update(
                ended=True
            )


def _open_cursors(
    run: Run,
    replicas: dict[int, Replica],
    incarnations: Iterable[tuple[int, str]],
    now: datetime,
) -> list[TelemetryCursor]:
    """Cursors still to be read, made for incarnations seen for the first time."""
    known = set(
        TelemetryCursor.objects.filter(replica__run=run).values_list(
            "replica__number", "incarnation"
        )
    )
    TelemetryCursor.objects.bulk_create(
        [
            TelemetryCursor(replica=replicas[number], incarnation=name, moved_at=now)
            for number, name in set(incarnations) - known
            if number in replicas
        ],
        ignore_conflicts=True,
    )
    cursors = list(
        TelemetryCursor.objects.filter(replica__run=run, ended=False)
        .select_related("replica")
        .order_by("replica__number", "incarnation")
    )
    for cursor in cursors:
        cursor.replica = replicas.get(cursor.replica.number, cursor.replica)
    return cursors


def read_batch(store: Store, cursor: TelemetryCursor) -> Batch:
    """GET segments until one is missing. I/O only."""
    found: list[tuple[int, Segment | BadRecord]] = []
    number = cursor.replica.number
    for n in range(cursor.next_n, cursor.next_n + SEGMENTS_PER_TICK):
        try:
            key = keys.telemetry(number, cursor.incarnation, n)
            data = store.get_range(key, 0, SEGMENT_LIMIT + 1)
        except MissingKey:
            return Batch(cursor=cursor, segments=tuple(found), drained=True)
        try:
            found.append((n, parse_segment(data, number, cursor.incarnation, n)))
        except BadRecord as error:
            found.append((n, error))
    return Batch(cursor=cursor, segments=tuple(found), drained=False)


def parse_segment(data: bytes, replica: int, incarnation: str, n: int) -> Segment:
    """A segment that is what its key says and fits the tables; :class:`BadRecord` otherwise."""
    if len(data) > SEGMENT_LIMIT:
        raise BadRecord(f"expected at most {SEGMENT_LIMIT} bytes, found more")
    segment = Segment.from_bytes(data)
    found = (segment.replica, segment.incarnation, segment.n)
    if found != (replica, incarnation, n):
        raise BadRecord(f"expected segment {(replica, incarnation, n)}, found {found}")
    steps = segment.steps
    length = len(steps.step)
    for name in ("round", "wall_s", "tokens"):
        if len(getattr(steps, name)) != length:
            raise BadRecord(f"expected {length} of {name}, found {len(getattr(steps, name))}")
    for name in ("loss", "lr", "grad_norm", "step_s"):
        if len(getattr(steps, name)) not in (0, length):
            raise BadRecord(f"expected {length} of {name}, found {len(getattr(steps, name))}")
    times = (*steps.wall_s, *(evaluation.wall_s for evaluation in segment.evaluations))
    if not all(map(math.isfinite, times)):
        raise BadRecord("wall_s: expected finite times, found one that is not")
    for name, limit in (("step", MAX_KEY), ("tokens", None), ("round", SMALL_LIMIT)):
        values = getattr(steps, name)
        if values:
            bounds = {} if limit is None else {"limit": limit}
            count(min(values), name, **bounds)
            count(max(values), name, **bounds)
    for report in segment.rounds:
        count(report.round, "round", limit=SMALL_LIMIT)
        count(report.requests, "requests", limit=SMALL_LIMIT)
        count(report.bytes_up, "bytes_up")
        count(report.bytes_down, "bytes_down")
        count(report.step, "step", limit=MAX_KEY)
        count(report.tokens, "tokens")
    for evaluation in segment.evaluations:
        count(evaluation.round, "round", limit=SMALL_LIMIT)
    return segment


def store_batches(
    run: Run, batches: Sequence[Batch], *, now: datetime, changes: Changes
) -> set[int]:
    """Ids of the cursors that were moved; another was faster with the others.

    What cannot be stored must not keep the others' from the tables: after an error that nobody
    thought of it is batch by batch, up to the one that raises it again."""
    if not batches:
        return set()
    found = Changes()
    try:
        stored = _store(run, batches, now=now, changes=found)
    except Exception:
        if len(batches) == 1:
            raise
        stored = set()
        for batch in batches:
            stored |= store_batches(run, [batch], now=now, changes=changes)
        return stored
    changes.add(found)
    return stored


def _store(run: Run, batches: Sequence[Batch], *, now: datetime, changes: Changes) -> set[int]:
    """One transaction: move the cursors, store what they passed."""
    with transaction.atomic():
        # Before the cursors, so that two workers cannot each wait for what the other has moved.
        locked = Run.objects.select_for_update().get(pk=run.pk)
        moved = [batch for batch in batches if _move(batch, now)]
        for batch in moved:
            for n, error in batch.bad:
                key = keys.telemetry(batch.cursor.replica.number, batch.cursor.incarnation, n)
                refuse(run, key, error, replica=batch.cursor.replica, passed=True)
        good = [(batch.cursor, batch.good) for batch in moved if batch.good]
        if good:
            store_segments(locked, good, now=now, changes=changes)
    return {batch.cursor.pk for batch in moved}


def _move(batch: Batch, now: datetime) -> bool:
    cursor = batch.cursor
    moved = TelemetryCursor.objects.filter(pk=cursor.pk, next_n=cursor.next_n).update(
        next_n=cursor.next_n + len(batch.segments),
        moved_at=now,
        refused=F("refused") + len(batch.bad),
        ended=any(s.last for s in batch.good),
    )
    return bool(moved)
