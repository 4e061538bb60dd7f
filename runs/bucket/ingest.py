"""Telemetry segments into tables, exactly once.

A cursor per incarnation holds the number of the next segment: GET it until it is not there. What a
batch of segments says and the cursor's move are one transaction under ``WHERE next_n = n``; a
worker that dies before the commit leaves nothing, one that lost a race stores nothing. A segment
that cannot be read is refused, named and counted, and the cursor passes it.

Reading (in threads, no database) is apart from storing: one transaction for all cursors of a tick,
because a transaction of each costs as much, and is most of a tick that finds a segment or two.
"""

from __future__ import annotations

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
from runs.bucket.limits import RunBounds, check_rounds, check_segment
from runs.bucket.reading import Changes, refuse
from runs.bucket.segments import store_segments
from runs.models import Replica, Run, TelemetryCursor

SEGMENTS_PER_TICK = 40
"""Per incarnation: a backlog is worked off over several ticks, not in one that lasts for ever."""
SEGMENT_LIMIT = Segment.LIMIT
BYTES_PER_TICK = 2 * SEGMENT_LIMIT
"""Per incarnation: a batch ends with the segment that goes beyond it."""
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
    bounds = RunBounds.of(run)
    with ThreadPoolExecutor(READERS) as pool:
        batches = list(pool.map(lambda cursor: read_batch(store, cursor, bounds), cursors))
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


def read_batch(store: Store, cursor: TelemetryCursor, bounds: RunBounds) -> Batch:
    """GET segments until one is missing. I/O only."""
    found: list[tuple[int, Segment | BadRecord]] = []
    number, read = cursor.replica.number, 0
    for n in range(cursor.next_n, cursor.next_n + SEGMENTS_PER_TICK):
        try:
            key = keys.telemetry(number, cursor.incarnation, n)
            data = store.get_range(key, 0, SEGMENT_LIMIT + 1)
        except MissingKey:
            return Batch(cursor=cursor, segments=tuple(found), drained=True)
        try:
            segment = parse_segment(data, number, cursor.incarnation, n, bounds)
            check_rounds(segment, bounds, store)
            found.append((n, segment))
        except BadRecord as error:
            found.append((n, error))
        read += len(data)
        if read > BYTES_PER_TICK:
            break
    return Batch(cursor=cursor, segments=tuple(found), drained=False)


def parse_segment(
    data: bytes, replica: int, incarnation: str, n: int, bounds: RunBounds
) -> Segment:
    """A segment that is what its key says and fits the tables; :class:`BadRecord` otherwise."""
    if len(data) > SEGMENT_LIMIT:
        raise BadRecord(f"expected at most {SEGMENT_LIMIT} bytes, found more")
    segment = Segment.from_bytes(data)
    found = (segment.replica, segment.incarnation, segment.n)
    if found != (replica, incarnation, n):
        raise BadRecord(f"expected segment {(replica, incarnation, n)}, found {found}")
    check_segment(segment, bounds)
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
