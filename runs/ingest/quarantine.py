"""Quarantine: records whose processing fails repeatedly are skipped, kept and shown.

A record is quarantined after :data:`FAILURES` failures. An exception is a failure, and so is a
process killed (out of memory, time limit) while it worked on the record. A kill leaves no
exception, so the following passes of that run are *careful*: they process one record at a time and
note its key before they parse it. The first careful pass that finishes ends this mode.

Records that cannot be parsed are refused at once (:func:`runs.ingest.validation.refuse`) and need
no quarantine. Quarantine is for failures that the code does not anticipate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

from celery.exceptions import SoftTimeLimitExceeded
from django.db import transaction

from diloco.protocol import keys
from diloco.protocol.records import BadRecord
from diloco.store.base import (
    LISTED,
    Data,
    MakeParts,
    NotAnObject,
    ObjectInfo,
    Pages,
    Store,
    StoreError,
    StoreUnavailable,
)
from runs.bulk import update_row
from runs.models import Event, QuarantinedRecord, Replica, Run
from runs.redaction import clean_text
from runs.transitions import record_event

logger = logging.getLogger(__name__)

FAILURES = 3
KEPT = 500
"""Rows kept per run. Beyond that the oldest are replaced by one count per replica."""
FORGOTTEN_AFTER = timedelta(minutes=10)
"""Age after which a record with fewer than :data:`FAILURES` failures can be dropped."""
_SUMMARY = "*"
PATIENCE_S = 25.0
"""Seconds that a pass waits for a store in total, below the task's time limit."""
QUICK_S = 2.0
"""A store whose requests take longer on average counts as slow."""
KILLED = "the ingest process ended while it worked on this record (memory or time limit)"


def _is_summary(row: QuarantinedRecord) -> bool:
    return row.key.endswith(_SUMMARY)


class UnexpectedStoreError(Exception):
    """The store raised an unexpected exception. It does not count against the record, which might
    not even exist."""


class PassTimeout(StoreError):
    """A pass waited too long for a store that does answer; the next pass continues. This is not a
    store failure: the run has many or large records, and other runs use the same store."""


class Quarantine:
    """The failed records of one run, during one pass."""

    def __init__(self, run: Run, *, now: datetime, careful: bool = False) -> None:
        self.run, self.now, self.careful = run, now, careful
        self._rows = {row.key: row for row in QuarantinedRecord.objects.filter(run=run)}

    def skips(self, key: str) -> str:
        """Why the record is skipped; '' if it is not."""
        row = self._rows.get(key)
        if row is None or row.failures < FAILURES:
            return ""
        if row.quarantined_at is None:  # the process was killed at the last failure
            self._quarantine(row)
        return f"quarantined after {row.failures} failures: {row.reason}"

    @property
    def count(self) -> int:
        """Number of records that are skipped."""
        skipped = (row for row in self._rows.values() if row.quarantined_at is not None)
        return sum(row.failures if _is_summary(row) else 1 for row in skipped)

    def failures(self, key: str) -> int:
        row = self._rows.get(key)
        return 0 if row is None else row.failures

    def begin(
        self,
        key: str,
        *,
        replica: Replica | None = None,
        incarnation: str = "",
        size_bytes: int | None = None,
    ) -> None:
        """Call before parsing a record. In a careful pass it counts as failed until
        :meth:`done`."""
        if self.careful:
            self._count(key, KILLED, replica, incarnation, size_bytes)

    def withdraw(self, key: str) -> None:
        """Undo :meth:`begin`: the store did not return the record, so the record did not fail."""
        row = self._rows.get(key)
        if self.careful and row is not None and row.reason == KILLED:
            row.failures -= 1
            own = QuarantinedRecord.objects.filter(pk=row.pk)
            if row.failures:
                own.update(failures=row.failures)
            else:
                own.delete()
                del self._rows[key]

    def done(self, names: Iterable[str]) -> None:
        """Forget the failures of records that are now stored."""
        known = [key for key in names if key in self._rows]
        if known:
            QuarantinedRecord.objects.filter(
                run=self.run, key__in=known, quarantined_at=None
            ).delete()
            for key in known:
                if self._rows[key].quarantined_at is None:
                    del self._rows[key]

    def failed(
        self,
        key: str,
        error: BaseException,
        *,
        replica: Replica | None = None,
        incarnation: str = "",
        size_bytes: int | None = None,
    ) -> None:
        """Count a failure; the record is quarantined at the last one."""
        reason = f"{type(error).__name__}: {error}"
        row = self._rows.get(key)
        if self.careful and row is not None and row.reason == KILLED:
            update_row(row, reason=clean_text(reason))  # begin() has counted it
        else:
            row = self._count(key, reason, replica, incarnation, size_bytes)
        if row is not None and row.failures >= FAILURES and row.quarantined_at is None:
            self._quarantine(row)

    def hold(self, key: str, reason: str, *, replica: Replica | None = None) -> None:
        """Quarantine immediately what no retry can read, such as a prefix with too many objects.

        The row stays until the run is deleted.
        """
        row = self._rows.get(key)
        if row is None:
            row = self._add(key, replica, "", None)
        if row is not None and row.quarantined_at is None:
            update_row(row, failures=1, reason=clean_text(reason))
            self._quarantine(row)

    def _count(
        self,
        key: str,
        reason: str,
        replica: Replica | None,
        incarnation: str,
        size_bytes: int | None,
    ) -> QuarantinedRecord | None:
        row = self._rows.get(key)
        if row is None:
            row = self._add(key, replica, incarnation, size_bytes)
        if row is None:
            return None
        row.failures += 1
        row.reason, row.last_at = clean_text(reason), self.now
        row.size_bytes = size_bytes if size_bytes is not None else row.size_bytes
        row.save(update_fields=("failures", "reason", "last_at", "size_bytes"))
        return row

    def _add(
        self, key: str, replica: Replica | None, incarnation: str, size_bytes: int | None
    ) -> QuarantinedRecord | None:
        if len(self._rows) >= KEPT and not self._make_room():
            logger.error("run %s: too many records have failed to note %s", self.run.pk, key)
            return None
        row, _ = QuarantinedRecord.objects.get_or_create(
            run=self.run,
            key=key,
            defaults={
                "replica": replica,
                "incarnation": clean_text(incarnation, 16),
                "size_bytes": size_bytes,
                "first_at": self.now,
                "last_at": self.now,
            },
        )
        self._rows[key] = row
        return row

    def _make_room(self) -> bool:
        """Replace the oldest quarantined row by a count, or drop one that failed long ago.

        A dropped record has to fail again before it is skipped. Returns False if no row can go.
        """
        rows = [row for row in self._rows.values() if not row.key.endswith(("/", _SUMMARY))]
        old = [row for row in rows if row.quarantined_at and row.quarantined_at < self.now]
        old = old or [row for row in rows if self.now - row.last_at > FORGOTTEN_AFTER]
        if not old:
            return False
        oldest = min(old, key=lambda row: (row.last_at, row.pk))
        with transaction.atomic():
            if oldest.quarantined_at is not None:
                self._sum_up(oldest)
            QuarantinedRecord.objects.filter(pk=oldest.pk).delete()
        del self._rows[oldest.key]
        return True

    def _sum_up(self, row: QuarantinedRecord) -> None:
        """Count the record in the summary row of its replica."""
        parts = row.key.split("/")[: 1 if row.replica_id is None else 2]
        key = f"{'/'.join(parts)}/{_SUMMARY}"
        summary, created = QuarantinedRecord.objects.get_or_create(
            run=self.run,
            key=key,
            defaults={
                "replica": row.replica,
                "first_at": row.first_at,
                "last_at": row.last_at,
                "quarantined_at": self.now,
            },
        )
        summary.failures, summary.last_at = summary.failures + 1, row.last_at
        summary.reason = clean_text(
            f"{summary.failures} more records were quarantined, most recently {row.key}: "
            f"{row.reason}"
        )
        summary.save(update_fields=("failures", "last_at", "reason"))
        self._rows[key] = summary
        if created:
            record_event(
                self.run,
                "quarantined",
                f"more than {KEPT} records are quarantined; those of {key} are only counted",
                level=Event.Level.ERROR,
                replica=row.replica,
            )

    def _quarantine(self, row: QuarantinedRecord) -> None:
        moved = QuarantinedRecord.objects.filter(pk=row.pk, quarantined_at=None).update(
            quarantined_at=self.now
        )
        row.quarantined_at = self.now
        if moved and not any(map(_is_summary, self._rows.values())):
            size = "" if row.size_bytes is None else f" ({row.size_bytes} bytes)"
            times = "" if row.failures < FAILURES else f" after {row.failures} failures"
            record_event(
                self.run,
                "quarantined",
                f"{row.key}{size} is quarantined{times}: {row.reason}",
                level=Event.Level.ERROR,
                replica=row.replica,
            )


class GuardedStore:
    """A store that reads records through a quarantine.

    A quarantined record raises :class:`BadRecord`. The keys read since the last :meth:`settle` are
    *in hand*; if storing them fails, :meth:`blame` counts a failure for each.
    """

    def __init__(
        self,
        inner: Store,
        quarantine: Quarantine,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self.uri, self.atomic_create = inner.uri, inner.atomic_create
        self.quarantine = quarantine
        self._in_hand: dict[str, int] = {}
        self._patience_s, self._clock = patience_s, clock
        self._waited_s, self._requests = 0.0, 0

    def settle(self) -> None:
        """The records in hand are stored."""
        self.quarantine.done(self._in_hand)
        self._in_hand.clear()

    def blame(self, error: BaseException) -> None:
        for key, size_bytes in self._in_hand.items():
            parsed = keys.parse_contribution_record(key)
            replica = parsed and self.quarantine.run.replicas.filter(number=parsed[1]).first()
            self.quarantine.failed(key, error, replica=replica or None, size_bytes=size_bytes)
        self._in_hand.clear()

    def _withdraw_all(self) -> None:
        """The records in hand were not stored, for a reason other than their content."""
        for key in self._in_hand:
            self.quarantine.withdraw(key)
        self._in_hand.clear()

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self._take(key, lambda: self.inner.get(key, limit=limit))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._take(key, lambda: self.inner.get_range(key, start, length))

    def _take(self, key: str, read: Callable[[], bytes]) -> bytes:
        if reason := self.quarantine.skips(key):
            raise BadRecord(reason)
        if _begins_a_unit(key):
            self.settle()
        self._in_hand[key] = 0
        self.quarantine.begin(key)  # reading alone can exceed the memory limit
        began = self._clock()
        try:
            self._check_patience(key)
            data = read()
        except NotAnObject as error:  # in a shared folder; treated like an unreadable record
            del self._in_hand[key]
            self.quarantine.withdraw(key)
            raise BadRecord(str(error)) from None
        except (StoreError, SoftTimeLimitExceeded) as error:
            del self._in_hand[key]
            self.quarantine.withdraw(key)
            if isinstance(error, StoreError):
                raise
            raise StoreUnavailable(f"{key}: no answer within the time of a pass") from error
        except Exception as error:
            self._withdraw_all()
            raise UnexpectedStoreError(f"{key}: {type(error).__name__}: {error}") from error
        finally:
            self._requests += 1
            self._waited_s += self._clock() - began
        self._in_hand[key] = len(data)
        return data

    def _check_patience(self, target: str) -> None:
        """Raise :class:`PassTimeout` if many requests used up the pass's time, and
        :class:`StoreUnavailable` if a few did."""
        if self._waited_s < self._patience_s:
            return
        if self._waited_s < QUICK_S * self._requests:
            raise PassTimeout(f"{target}: {self._requests} requests took {self._waited_s:.0f} s")
        raise StoreUnavailable(f"{target}: the store took too long for the records before")

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        self._check_patience(prefix)
        began = self._clock()
        try:
            return self.inner.list(prefix, limit=limit)
        finally:
            self._requests += 1
            self._waited_s += self._clock() - began

    def list_pages(self, prefix: str) -> Pages:
        return self.inner.list_pages(prefix)

    def put(self, key: str, data: Data) -> None:
        self.inner.put(key, data)

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        self.inner.put_stream(key, make_parts, size_bytes=size_bytes)

    def create(self, key: str, data: Data) -> bool:
        return self.inner.create(key, data)

    def delete(self, names: Iterable[str]) -> None:
        self.inner.delete(names)


def _begins_a_unit(key: str) -> bool:
    """Whether storing starts over here: a round begins with its commit, a checkpoint with its
    manifest."""
    return key.endswith("/commit.json") or keys.parse_checkpoint_manifest(key) is not None
