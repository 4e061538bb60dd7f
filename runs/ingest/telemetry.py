"""Stores telemetry segments exactly once.

A cursor per incarnation holds the number of its next segment: GET it until it is missing. The rows
of a batch of segments and the cursor's move are one transaction under ``WHERE next_n = n``. A
worker that dies before the commit stores nothing, and neither does one that loses a race. A segment
that cannot be read is refused, recorded and counted, and the cursor moves past it. The same happens
to a segment whose processing fails repeatedly (:mod:`runs.ingest.quarantine`).

Fetching (threads, no database) is separate from parsing and storing. The main thread parses,
because a time limit can interrupt it, one segment of each incarnation in turn, least recently read
first. :mod:`runs.ingest.segment_store` stores the result. A pass ends with its budget
(:mod:`runs.ingest.budget`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from diloco.protocol.packed_telemetry import PACK_LIMIT, first_of_block, read_pack
from diloco.protocol.reading import READS
from diloco.protocol.records import BadRecord
from diloco.protocol.telemetry import Segment
from diloco.store.base import MissingKey, NotAnObject, Store
from runs.ingest.budget import Budget, Unlimited
from runs.ingest.limits import RunBounds, check_rounds, check_segment
from runs.ingest.quarantine import Quarantine
from runs.ingest.segment_store import (
    Batch,
    count_failure,
    segment_key,
    store_batches,
    store_groups,
    transactions_of,
)
from runs.ingest.telemetry_gaps import find_gap
from runs.ingest.validation import refuse
from runs.metrics.changes import Changes
from runs.models import Replica, Run, TelemetryCursor

logger = logging.getLogger(__name__)

SEGMENTS_PER_TICK = 40
"""Per incarnation: a backlog is spread over several ticks."""
SEGMENT_LIMIT = Segment.LIMIT
BYTES_PER_TICK = 2 * SEGMENT_LIMIT
"""Per incarnation: a batch ends with the segment that exceeds this."""
READERS = 8
PACKED_AFTER = timedelta(seconds=30)
"""A cursor that has not moved for this long looks for a pack of the next segment."""
DELETED_AFTER = timedelta(minutes=30)
"""A cursor that has not moved for this long looks for later segments: those after it can have been
deleted before they were read."""
STALE_AFTER = timedelta(seconds=60)
"""A superseded incarnation that wrote nothing for this long is no longer read."""


@dataclass
class _Fetched:
    """Segments of one incarnation: fetched and not parsed yet, and parsed ones."""

    cursor: TelemetryCursor
    data: deque[tuple[int, bytes | BadRecord]] = field(default_factory=deque)
    drained: bool = False
    parsed: list[tuple[int, Segment | BadRecord]] = field(default_factory=list)
    failed: bool = False

    @property
    def batch(self) -> Batch:
        is_complete = self.drained and not self.data and not self.failed
        return Batch(cursor=self.cursor, segments=tuple(self.parsed), drained=is_complete)


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
    skips_gaps: bool = True,
) -> bool:
    """Read new segments of every known incarnation; False if some are left for the next pass.

    ``ended`` are the numbers of replicas without a job that can still write. With ``skips_gaps``
    cursors move past segments that were deleted (:mod:`runs.ingest.telemetry_gaps`).
    """
    telemetry = _TelemetryPass(
        run=run,
        store=store,
        now=now,
        changes=changes,
        budget=budget or Unlimited(),
        quarantine=quarantine or Quarantine(run, now=now),
        ended=ended,
        skips_gaps=skips_gaps,
    )
    cursors = _open_cursors(run, {r.number: r for r in replicas}, incarnations, now)
    cursors.sort(key=lambda cursor: (telemetry.failures_of(cursor), cursor.moved_at))
    if telemetry.quarantine.careful:
        return telemetry.read_carefully(cursors)
    return telemetry.read(cursors) if cursors else True


@dataclass(kw_only=True)
class _TelemetryPass:
    """One pass over the segments of a run."""

    run: Run
    store: Store
    now: datetime
    changes: Changes
    budget: Budget
    quarantine: Quarantine
    ended: frozenset[int]
    skips_gaps: bool

    def __post_init__(self) -> None:
        self.bounds = RunBounds.of(self.run)

    def read(self, cursors: Sequence[TelemetryCursor]) -> bool:
        """Read the new segments of all cursors; False if some are left."""
        skipped = [self._skipped(cursor) for cursor in cursors]
        with ThreadPoolExecutor(READERS) as pool:
            fetched = list(pool.map(self._fetch, cursors, skipped))
        self._parse_in_turns(fetched)
        batches = [one.batch for one in fetched]
        stored, is_complete = store_groups(
            self.run,
            transactions_of(batches),
            now=self.now,
            changes=self.changes,
            quarantine=self.quarantine,
            can_store=self.budget.can_store,
        )
        unmoved = [b for b in batches if b.drained and not b.segments and b.cursor.pk not in stored]
        skipped_some = self._end_drained(unmoved)
        return is_complete and not skipped_some and all(batch.drained for batch in batches)

    def read_carefully(self, cursors: Iterable[TelemetryCursor]) -> bool:
        """Process one segment at a time and note each before parsing; False if some are left."""
        waiting = list(cursors)
        while waiting:
            for cursor in tuple(waiting):
                if not self.budget.has_room():
                    return False
                if not self._read_one(cursor):
                    waiting.remove(cursor)
        return True

    def _read_one(self, cursor: TelemetryCursor) -> bool:
        """Whether the cursor moved past a segment, so that the next one can be read."""
        key = segment_key(cursor, cursor.next_n)
        fetched = self._fetch(cursor, self._skipped(cursor, most=1), most=1)
        if not fetched.data:
            return False
        _, data = fetched.data[0]
        if isinstance(data, bytes):
            self.quarantine.begin(
                key, replica=cursor.replica, incarnation=cursor.incarnation, size_bytes=len(data)
            )
        self._parse_next(fetched)
        if fetched.failed or not store_batches(
            self.run,
            [fetched.batch],
            now=self.now,
            changes=self.changes,
            quarantine=self.quarantine,
        ):
            return False
        self.quarantine.done([key])
        cursor.refresh_from_db(fields=("next_n", "moved_at", "ended", "refused"))
        return not cursor.ended

    def failures_of(self, cursor: TelemetryCursor) -> int:
        return self.quarantine.failures(segment_key(cursor, cursor.next_n))

    def _skipped(self, cursor: TelemetryCursor, most: int | None = None) -> dict[int, str]:
        """Quarantined segments among the next ones, with reasons. Call it before starting
        threads."""
        numbers = _next_numbers(cursor, most)
        return {
            n: reason for n in numbers if (reason := self.quarantine.skips(segment_key(cursor, n)))
        }

    def _fetch(
        self, cursor: TelemetryCursor, skipped: Mapping[int, str], most: int | None = None
    ) -> _Fetched:
        """GET segments until one is missing. I/O only."""
        fetched, read = _Fetched(cursor=cursor), 0
        packed: dict[int, bytes] = {}
        refused: dict[int, BadRecord] = {}
        """Packs that cannot be read, by their first segment: each is read once."""
        for n in _next_numbers(cursor, most):
            if n in skipped:
                fetched.data.append((n, BadRecord(skipped[n])))
                continue
            if read > BYTES_PER_TICK or not self.budget.has_room():
                return fetched
            try:
                data = packed[n] if n in packed else self._read_single(cursor, n)
            except MissingKey:
                first = first_of_block(n)
                try:
                    packed = {} if first in refused else self._read_pack(fetched, n)
                except BadRecord as error:
                    refused[first] = error
                if first in refused:
                    fetched.data.append((n, refused[first]))
                    continue
                if n not in packed:
                    fetched.drained = True
                    return fetched
                data = packed[n]
            except NotAnObject as error:
                fetched.data.append((n, BadRecord(str(error))))
                continue
            read += len(data)
            self.budget.use(len(data))
            fetched.data.append((n, data))
        return fetched

    def _read_single(self, cursor: TelemetryCursor, n: int) -> bytes:
        return self.store.get_range(segment_key(cursor, n), 0, SEGMENT_LIMIT + 1)

    def _read_pack(self, fetched: _Fetched, n: int) -> dict[int, bytes]:
        """Return the pack of a segment that is missing, empty without one. I/O only.

        Segments are packed many minutes after they were written. So a cursor that has just read all
        segments, the usual case, asks for no pack, unless its process has ended: it would be ended
        or moved on. An import reads everything at once.
        """
        cursor = fetched.cursor
        follows = self.skips_gaps and cursor.replica.number not in self.ended
        is_recent = self.now - cursor.moved_at < PACKED_AFTER
        if follows and is_recent and n > 1 and not fetched.data:
            return {}
        try:
            segments = read_pack(self.store, cursor.replica.number, cursor.incarnation, n)
        except BadRecord:
            self.budget.use(READS * PACK_LIMIT)  # at most: its size is unknown
            raise
        self.budget.use(sum(map(len, segments.values())))
        return segments

    def _parse_in_turns(self, fetched: Sequence[_Fetched]) -> None:
        """Parse one segment of each incarnation, then the next, while the budget lasts."""
        budget = self.budget
        waiting = [one for one in fetched if one.data]
        while waiting and budget.has_time() and budget.has_lines():
            for one in waiting:
                if budget.has_time() and budget.has_lines():
                    self._parse_next(one)
                    last = one.parsed[-1][1] if one.parsed else None
                    budget.use_lines(len(last.logs) if isinstance(last, Segment) else 0)
            waiting = [one for one in waiting if one.data and not one.failed]

    def _parse_next(self, fetched: _Fetched) -> None:
        n, data = fetched.data.popleft()
        cursor = fetched.cursor
        if isinstance(data, BadRecord):
            fetched.parsed.append((n, data))
            return
        try:
            segment = parse_segment(data, cursor.replica.number, cursor.incarnation, n, self.bounds)
            check_rounds(segment, self.bounds, self.store)
        except BadRecord as error:
            fetched.parsed.append((n, error))
        except Exception as error:  # later segments of this incarnation wait for this one
            fetched.failed = True
            count_failure(self.quarantine, cursor, n, error, len(data))
        else:
            fetched.parsed.append((n, segment))

    def _end_drained(self, batches: Iterable[Batch]) -> bool:
        """End the cursors without new segments whose process can write none; return whether any was
        moved past deleted segments instead."""
        skipped_some = False
        newest: dict[int, str] = {}
        for cursor in TelemetryCursor.objects.filter(replica__run=self.run).select_related(
            "replica"
        ):
            number = cursor.replica.number
            newest[number] = max(newest.get(number, ""), cursor.incarnation)
        for batch in batches:
            cursor = batch.cursor
            superseded = cursor.incarnation < newest[cursor.replica.number]
            stale = superseded and self.now - cursor.moved_at > STALE_AFTER
            is_over = cursor.replica.number in self.ended or stale
            waits_long = self.now - cursor.moved_at > DELETED_AFTER and self.budget.has_room()
            if (is_over or waits_long) and self._skip_gap(cursor):
                skipped_some = True
                continue
            same = TelemetryCursor.objects.filter(pk=cursor.pk, next_n=cursor.next_n)
            if is_over:
                same.update(ended=True)
            elif waits_long:  # looking lists a folder, so it is repeated after as long
                same.update(moved_at=self.now)
        return skipped_some

    def _skip_gap(self, cursor: TelemetryCursor) -> bool:
        """Move a cursor past segments that were deleted; return whether there are such."""
        gap = find_gap(self.store, cursor) if self.skips_gaps else None
        if gap is None or not gap.skip():
            return False
        first, last = gap.ends
        error = BadRecord(f"expected the segments up to {last}, found none: they were deleted")
        refuse(self.run, first, error, replica=cursor.replica, passed=True)
        return True


def _next_numbers(cursor: TelemetryCursor, most: int | None) -> range:
    return range(cursor.next_n, cursor.next_n + (most or SEGMENTS_PER_TICK))


def _open_cursors(
    run: Run,
    replicas: dict[int, Replica],
    incarnations: Iterable[tuple[int, str]],
    now: datetime,
) -> list[TelemetryCursor]:
    """Cursors to read; created for new incarnations."""
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


def parse_segment(
    data: bytes, replica: int, incarnation: str, n: int, bounds: RunBounds
) -> Segment:
    """Parse a segment. Raises :class:`BadRecord` if it does not match its key or the limits."""
    if len(data) > SEGMENT_LIMIT:
        raise BadRecord(f"expected at most {SEGMENT_LIMIT} bytes, found more")
    segment = Segment.from_bytes(data)
    identity = (segment.replica, segment.incarnation, segment.n)
    if identity != (replica, incarnation, n):
        raise BadRecord(f"expected segment {(replica, incarnation, n)}, found {identity}")
    check_segment(segment, bounds)
    return segment
