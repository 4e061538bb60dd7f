"""Telemetry segments into tables, exactly once.

A cursor per incarnation holds the number of the next segment: GET it until it is not there. What a
batch of segments says and the cursor's move are one transaction under ``WHERE next_n = n``; a
worker that dies before the commit leaves nothing, one that lost a race stores nothing. A segment
that cannot be read is refused, named and counted, and the cursor passes it. So does one whose
processing fails again and again (:mod:`runs.ingest.quarantine`).

Fetching (in threads, no database) is apart from parsing and storing. Segments are parsed in the
main thread, which a time limit can interrupt, and in turns: one of each incarnation, the one that
was read longest ago first. All cursors of a pass are stored in one transaction, because a
transaction of each costs as much, or in several where they hold more than :data:`WORK`; when that
fails, segment by segment, so that a bad segment holds back its own incarnation only. A pass ends
with its budget (:mod:`runs.ingest.budget`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F

from diloco.protocol import keys
from diloco.protocol.records import BadRecord
from diloco.protocol.telemetry import Segment
from diloco.store.base import MissingKey, NotAnObject, Store
from runs.ingest.budget import Budget, Unlimited
from runs.ingest.limits import RunBounds, check_rounds, check_segment, work_of
from runs.ingest.quarantine import Quarantine
from runs.ingest.segments import store_segments
from runs.ingest.validation import refuse
from runs.metrics.changes import Changes
from runs.models import Replica, Run, TelemetryCursor

logger = logging.getLogger(__name__)

SEGMENTS_PER_TICK = 40
"""Per incarnation: a backlog is worked off over several ticks, not in one that lasts for ever."""
SEGMENT_LIMIT = Segment.LIMIT
BYTES_PER_TICK = 2 * SEGMENT_LIMIT
"""Per incarnation: a batch ends with the segment that goes beyond it."""
WORK = 300_000
"""Of one transaction, in the unit of :func:`~runs.ingest.limits.work_of`: about a second, for which
all other writers of SQLite wait."""
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


@dataclass
class _Fetched:
    """Segments of one incarnation that were fetched and not parsed yet, and those that were."""

    cursor: TelemetryCursor
    data: deque[tuple[int, bytes | BadRecord]]
    drained: bool
    parsed: list[tuple[int, Segment | BadRecord]] = field(default_factory=list)
    failed: bool = False

    @property
    def batch(self) -> Batch:
        whole = self.drained and not self.data and not self.failed
        return Batch(cursor=self.cursor, segments=tuple(self.parsed), drained=whole)


def ingest_telemetry(
    run: Run,
    store: Store,
    replicas: Sequence[Replica],
    incarnations: Iterable[tuple[int, str]],
    *,
    ended: frozenset[int],
    now: datetime,
    changes: Changes,
    budget: Budget | None = None,
    quarantine: Quarantine | None = None,
) -> bool:
    """Read what is new of every known incarnation; False where something is left for the next
    pass. ``ended`` are the numbers of replicas without a job that can still write."""
    budget = budget or Unlimited()
    quarantine = quarantine or Quarantine(run, now=now)
    by_number = {r.number: r for r in replicas}
    cursors = _open_cursors(run, by_number, incarnations, now)
    if not cursors:
        return True
    cursors.sort(key=lambda cursor: (_suspected(cursor, quarantine), cursor.moved_at))
    if quarantine.careful:
        return _ingest_carefully(run, store, cursors, now, changes, budget, quarantine)
    skipped = {cursor.pk: _skipped(cursor, quarantine) for cursor in cursors}
    with ThreadPoolExecutor(READERS) as pool:
        fetched = list(
            pool.map(lambda cursor: _fetch(store, cursor, budget, skipped[cursor.pk]), cursors)
        )
    _parse_in_turns(fetched, Parser(store=store, bounds=RunBounds.of(run)), budget, quarantine)
    batches = [found.batch for found in fetched]
    newest: dict[int, str] = {}
    for cursor in TelemetryCursor.objects.filter(replica__run=run).select_related("replica"):
        number = cursor.replica.number
        newest[number] = max(newest.get(number, ""), cursor.incarnation)
    stored, whole = _store_in_turns(run, batches, now, changes, budget, quarantine)
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
    return whole and all(batch.drained for batch in batches)


def _store_in_turns(
    run: Run,
    batches: Sequence[Batch],
    now: datetime,
    changes: Changes,
    budget: Budget,
    quarantine: Quarantine,
) -> tuple[set[int], bool]:
    """Ids of the cursors that were moved, and whether all there was is stored: what takes longer
    than the budget is read again by the next pass."""
    stored: set[int] = set()
    stopped: set[int] = set()
    for number, group in enumerate(transactions_of(batches)):
        if number and not budget.can_store():
            return stored, False
        parts = [part for part in group if part.cursor.pk not in stopped]
        for part in parts:
            if part.cursor.pk in stored:
                part.cursor.refresh_from_db(fields=("next_n",))
        parts = [part for part in parts if part.segments[0][0] == part.cursor.next_n]
        moved = store_batches(run, parts, now=now, changes=changes, quarantine=quarantine)
        stored |= moved
        stopped |= {part.cursor.pk for part in group} - moved
    return stored, not stopped


def transactions_of(batches: Iterable[Batch]) -> list[list[Batch]]:
    """The same segments in groups of at most :data:`WORK` each, or of one segment. A group has at
    most one batch of each cursor."""
    groups: list[list[Batch]] = [[]]
    work = 0
    for batch in batches:
        part: list[tuple[int, Segment | BadRecord]] = []
        for n, segment in batch.segments:
            more = work_of(segment) if isinstance(segment, Segment) else 0
            if work and work + more > WORK:
                groups[-1] += [replace(batch, segments=tuple(part))] if part else []
                groups.append([])
                part, work = [], 0
            part.append((n, segment))
            work += more
        groups[-1] += [replace(batch, segments=tuple(part))] if part else []
    return [group for group in groups if group]


def _key(cursor: TelemetryCursor, n: int) -> str:
    return keys.telemetry(cursor.replica.number, cursor.incarnation, n)


def _suspected(cursor: TelemetryCursor, quarantine: Quarantine) -> int:
    return quarantine.failures(_key(cursor, cursor.next_n))


def _skipped(cursor: TelemetryCursor, quarantine: Quarantine) -> dict[int, str]:
    """Quarantined segments among the next ones, and why. Asked before threads are started."""
    numbers = range(cursor.next_n, cursor.next_n + SEGMENTS_PER_TICK)
    return {n: reason for n in numbers if (reason := quarantine.skips(_key(cursor, n)))}


def _fetch(
    store: Store, cursor: TelemetryCursor, budget: Budget, skipped: Mapping[int, str]
) -> _Fetched:
    """GET segments until one is missing. I/O only."""
    found, read = _Fetched(cursor=cursor, data=deque(), drained=False), 0
    for n in range(cursor.next_n, cursor.next_n + SEGMENTS_PER_TICK):
        if n in skipped:
            found.data.append((n, BadRecord(skipped[n])))
            continue
        if read > BYTES_PER_TICK or not budget.has_room():
            return found
        try:
            data = store.get_range(_key(cursor, n), 0, SEGMENT_LIMIT + 1)
        except MissingKey:
            found.drained = True
            return found
        except NotAnObject as error:
            found.data.append((n, BadRecord(str(error))))
            continue
        read += len(data)
        budget.use(len(data))
        found.data.append((n, data))
    return found


def _parse_in_turns(
    fetched: Sequence[_Fetched], parser: Parser, budget: Budget, quarantine: Quarantine
) -> None:
    """One segment of each incarnation, then the next, while there is time."""
    waiting = [found for found in fetched if found.data]
    while waiting and budget.has_time() and budget.has_lines():
        for found in waiting:
            if budget.has_time() and budget.has_lines():
                _parse_next(found, parser, quarantine)
                last = found.parsed[-1][1] if found.parsed else None
                budget.use_lines(len(last.logs) if isinstance(last, Segment) else 0)
        waiting = [found for found in waiting if found.data and not found.failed]


def _parse_next(found: _Fetched, parser: Parser, quarantine: Quarantine) -> None:
    n, data = found.data.popleft()
    cursor = found.cursor
    if isinstance(data, BadRecord):
        found.parsed.append((n, data))
        return
    try:
        found.parsed.append((n, parser.parse(cursor, n, data)))
    except BadRecord as error:
        found.parsed.append((n, error))
    except Exception as error:  # later segments of this incarnation wait for this one
        found.failed = True
        _failed(quarantine, cursor, n, error, len(data))


def _failed(
    quarantine: Quarantine,
    cursor: TelemetryCursor,
    n: int,
    error: Exception,
    size_bytes: int | None = None,
) -> None:
    logger.exception("segment %s could not be processed", _key(cursor, n))
    quarantine.failed(
        _key(cursor, n), error, replica=cursor.replica, incarnation=cursor.incarnation,
        size_bytes=size_bytes,
    )  # fmt: skip


def _ingest_carefully(
    run: Run,
    store: Store,
    cursors: Sequence[TelemetryCursor],
    now: datetime,
    changes: Changes,
    budget: Budget,
    quarantine: Quarantine,
) -> bool:
    """One segment after another, each noted before it is parsed; False where one is left."""
    waiting = list(cursors)
    while waiting:
        for cursor in tuple(waiting):
            if not budget.has_room():
                return False
            if not _ingest_one(run, store, cursor, now, changes, budget, quarantine):
                waiting.remove(cursor)
    return True


def _ingest_one(
    run: Run,
    store: Store,
    cursor: TelemetryCursor,
    now: datetime,
    changes: Changes,
    budget: Budget,
    quarantine: Quarantine,
) -> bool:
    """Whether a segment was passed, so that the next can be read."""
    n, key = cursor.next_n, _key(cursor, cursor.next_n)
    if reason := quarantine.skips(key):
        found = _Fetched(cursor=cursor, data=deque([(n, BadRecord(reason))]), drained=False)
    else:
        try:
            data = store.get_range(key, 0, SEGMENT_LIMIT + 1)
        except MissingKey:
            return False
        except NotAnObject as error:
            found = _Fetched(cursor=cursor, data=deque([(n, BadRecord(str(error)))]), drained=False)
        else:
            budget.use(len(data))
            found = _Fetched(cursor=cursor, data=deque([(n, data)]), drained=False)
            quarantine.begin(
                key, replica=cursor.replica, incarnation=cursor.incarnation, size_bytes=len(data)
            )
    _parse_next(found, Parser(store=store, bounds=RunBounds.of(run)), quarantine)
    if found.failed:
        return False
    stored = store_batches(run, [found.batch], now=now, changes=changes, quarantine=quarantine)
    if cursor.pk not in stored:
        return False
    quarantine.done([key])
    cursor.refresh_from_db(fields=("next_n", "moved_at", "ended", "refused"))
    return not cursor.ended


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
    """Fetch and parse what is new of one incarnation. No database."""
    parser = Parser(store=store, bounds=bounds)
    found = _fetch(store, cursor, Unlimited(), {})
    for n, data in found.data:
        if isinstance(data, BadRecord):
            found.parsed.append((n, data))
            continue
        try:
            found.parsed.append((n, parser.parse(cursor, n, data)))
        except BadRecord as error:
            found.parsed.append((n, error))
    found.data.clear()
    return found.batch


@dataclass(frozen=True, kw_only=True)
class Parser:
    """Segments of one run: what they can say, and the store that shows whether a round that they
    name is committed."""

    store: Store
    bounds: RunBounds

    def parse(self, cursor: TelemetryCursor, n: int, data: bytes) -> Segment:
        """Raises :class:`BadRecord`, and what the store raises."""
        segment = parse_segment(data, cursor.replica.number, cursor.incarnation, n, self.bounds)
        check_rounds(segment, self.bounds, self.store)
        return segment


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
    run: Run,
    batches: Sequence[Batch],
    *,
    now: datetime,
    changes: Changes,
    quarantine: Quarantine | None = None,
) -> set[int]:
    """Ids of the cursors that were moved; another process was faster with the others.

    After an error each batch is stored alone, then each segment: those before the one that fails
    are stored, and the failure is counted in the quarantine (without one it is raised)."""
    if not batches:
        return set()
    found = Changes()
    try:
        stored = _store(run, batches, now=now, changes=found)
    except Exception as error:
        parts = [
            p for batch in batches for p in (_one_by_one(batch) if len(batches) == 1 else [batch])
        ]
        if len(parts) > 1:
            return _store_parts(run, parts, now, changes, quarantine)
        if quarantine is None or len(batches[0].segments) != 1:
            raise
        _failed(quarantine, batches[0].cursor, batches[0].segments[0][0], error)
        return set()
    if quarantine is not None:
        quarantine.done(
            _key(batch.cursor, n) for batch in batches if batch.cursor.pk in stored
            for n, _ in batch.segments
        )  # fmt: skip
    changes.add(found)
    return stored


def _one_by_one(batch: Batch) -> list[Batch]:
    return [replace(batch, segments=(one,)) for one in batch.segments]


def _store_parts(
    run: Run,
    parts: Sequence[Batch],
    now: datetime,
    changes: Changes,
    quarantine: Quarantine | None,
) -> set[int]:
    stored: set[int] = set()
    stopped: set[int] = set()
    for part in parts:
        cursor = part.cursor
        if cursor.pk in stopped:
            continue
        cursor.refresh_from_db(fields=("next_n",))
        if not part.segments or part.segments[0][0] != cursor.next_n:
            continue
        moved = store_batches(run, [part], now=now, changes=changes, quarantine=quarantine)
        stored |= moved
        if not moved:
            stopped.add(cursor.pk)
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
