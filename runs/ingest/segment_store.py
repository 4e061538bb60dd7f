"""Stores parsed telemetry segments and moves their cursors, each segment once.

All batches are stored in one transaction, since each transaction has a fixed cost, or in several if
they hold more than :data:`WORK`. If that fails, segments are stored one by one, so that a bad
segment delays only its own incarnation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from django.db import transaction
from django.db.models import F

from diloco.protocol import keys
from diloco.protocol.records import BadRecord
from diloco.protocol.telemetry import Segment
from runs.ingest.limits import work_of
from runs.ingest.quarantine import Quarantine
from runs.ingest.segments import store_segments
from runs.ingest.validation import refuse
from runs.metrics.changes import Changes
from runs.models import Run, TelemetryCursor

logger = logging.getLogger(__name__)

WORK = 300_000
"""Of one transaction, in units of :func:`~runs.ingest.limits.work_of`: about a second, during which
every other writer of SQLite waits."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive segments of one incarnation; an unreadable one is represented by its error.
    ``drained``: the segment after them does not exist yet."""

    cursor: TelemetryCursor
    segments: tuple[tuple[int, Segment | BadRecord], ...]
    drained: bool

    @property
    def good(self) -> list[Segment]:
        return [segment for _, segment in self.segments if isinstance(segment, Segment)]

    @property
    def bad(self) -> list[tuple[int, BadRecord]]:
        return [(n, error) for n, error in self.segments if isinstance(error, BadRecord)]


def transactions_of(batches: Iterable[Batch]) -> list[list[Batch]]:
    """Split the batches into groups of at most :data:`WORK` each, or of one segment. A group has at
    most one batch per cursor."""
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


def store_batches(
    run: Run,
    batches: Sequence[Batch],
    *,
    now: datetime,
    changes: Changes,
    quarantine: Quarantine | None = None,
) -> set[int]:
    """Store batches; return the ids of moved cursors. Another process has moved the others.

    After an error each batch is stored alone, then each segment. Segments before the failing one
    are stored. The failure is counted in the quarantine, or raised without one.
    """
    if not batches:
        return set()
    stored_changes = Changes()
    try:
        stored = _store(run, batches, now=now, changes=stored_changes)
    except Exception as error:
        parts = [
            p for batch in batches for p in (_one_by_one(batch) if len(batches) == 1 else [batch])
        ]
        if len(parts) > 1:
            groups = [[part] for part in parts]
            stored, _ = store_groups(run, groups, now=now, changes=changes, quarantine=quarantine)
            return stored
        if quarantine is None or len(batches[0].segments) != 1:
            raise
        count_failure(quarantine, batches[0].cursor, batches[0].segments[0][0], error)
        return set()
    if quarantine is not None:
        quarantine.done(
            segment_key(batch.cursor, n)
            for batch in batches
            if batch.cursor.pk in stored
            for n, _ in batch.segments
        )
    changes.add(stored_changes)
    return stored


def _one_by_one(batch: Batch) -> list[Batch]:
    return [replace(batch, segments=(one,)) for one in batch.segments]


def store_groups(
    run: Run,
    groups: Sequence[Sequence[Batch]],
    *,
    now: datetime,
    changes: Changes,
    quarantine: Quarantine | None,
    can_store: Callable[[], bool] = lambda: True,
) -> tuple[set[int], bool]:
    """Store one group after the other, while ``can_store``.

    Returns the ids of moved cursors, and whether everything was stored. After a batch that was not
    stored, the later ones of its cursor are left for the next pass.
    """
    stored: set[int] = set()
    stopped: set[int] = set()
    for number, group in enumerate(groups):
        if number and not can_store():
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


def _store(run: Run, batches: Sequence[Batch], *, now: datetime, changes: Changes) -> set[int]:
    """Move the cursors and store their segments in one transaction."""
    with transaction.atomic():
        # Locked before the cursors; otherwise two workers could deadlock on each other's cursors.
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


def segment_key(cursor: TelemetryCursor, n: int) -> str:
    return keys.telemetry(cursor.replica.number, cursor.incarnation, n)


def count_failure(
    quarantine: Quarantine,
    cursor: TelemetryCursor,
    n: int,
    error: Exception,
    size_bytes: int | None = None,
) -> None:
    logger.exception("segment %s could not be processed", segment_key(cursor, n))
    quarantine.failed(
        segment_key(cursor, n),
        error,
        replica=cursor.replica,
        incarnation=cursor.incarnation,
        size_bytes=size_bytes,
    )
