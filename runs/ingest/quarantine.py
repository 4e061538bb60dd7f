"""Records whose processing fails again and again are skipped, kept and shown.

A record that fails :data:`FAILURES` times is quarantined: an exception counts, and so does a
process that was killed (out of memory, time limit) while it worked on the record. A kill leaves no
exception, so after one the passes of that run are *careful*: they take one record at a time and
write down which, before they parse it. A careful pass that comes to its end is the last of them.

What cannot be parsed is refused at once (:func:`runs.ingest.validation.refuse`) and needs no
quarantine: this is for records that the code did not foresee.
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
from runs.models import Event, QuarantinedRecord, Replica, Run
from runs.transitions import clean_text, record_event

logger = logging.getLogger(__name__)

FAILURES = 3
KEPT = 500
"""Rows of one run. Past it the oldest make room and are counted, in one row for each replica."""
FORGOTTEN_AFTER = timedelta(minutes=10)
"""A record that has failed less than :data:`FAILURES` times, and not for so long, can make room."""
_SUMMARY = "*"
PATIENCE_S = 25.0
"""Seconds in all that a pass waits for a store, less than its time limit."""
QUICK_S = 2.0
"""A request that takes longer on average is one of a slow store."""
KILLED = "the ingest process ended while it worked on this record (memory or time limit)"


def _is_summary(row: QuarantinedRecord) -> bool:
    return row.key.endswith(_SUMMARY)


class Unreadable(Exception):
    """The store raised what a store does not raise. It says nothing about the record, which may not
    even exist, so it does not count against it."""


class OutOfTime(StoreError):
    """The store answers, and a pass has waited for it long enough: the next goes on. It is the
    run's records that take long, so it is no failure of the store, which other runs use too."""


class Quarantine:
    """The records of one run that have failed, during one pass."""

    def __init__(self, run: Run, *, now: datetime, careful: bool = False) -> None:
        self.run, self.now, self.careful = run, now, careful
        self._rows = {row.key: row for row in QuarantinedRecord.objects.filter(run=run)}

    def skips(self, key: str) -> str:
        """Why the record is not read; '' where it is."""
        row = self._rows.get(key)
        if row is None or row.failures < FAILURES:
            return ""
        if row.quarantined_at is None:  # the process was killed at the last failure
            self._quarantine(row)
        return f"quarantined after {row.failures} failures: {row.reason}"

    @property
    def count(self) -> int:
        """Records that are skipped."""
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
        """Before a record is parsed. In a careful pass this counts as a failure until
        :meth:`done`."""
        if self.careful:
            self._count(key, KILLED, replica, incarnation, size_bytes)

    def withdraw(self, key: str) -> None:
        """The store did not give the record: what :meth:`begin` counted is no failure of it."""
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
        """These records are stored."""
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
        """The record raised ``error``; at the last failure it is quarantined."""
        reason = f"{type(error).__name__}: {error}"
        row = self._rows.get(key)
        if self.careful and row is not None and row.reason == KILLED:
            row.reason = clean_text(reason)  # begin() has counted it
            QuarantinedRecord.objects.filter(pk=row.pk).update(reason=row.reason)
        else:
            row = self._count(key, reason, replica, incarnation, size_bytes)
        if row is not None and row.failures >= FAILURES and row.quarantined_at is None:
            self._quarantine(row)

    def hold(self, key: str, reason: str, *, replica: Replica | None = None) -> None:
        """Quarantine at once what cannot be read however often it is tried, such as a prefix that
        holds too many objects. The row stays until the run is deleted."""
        row = self._rows.get(key)
        if row is None:
            row = self._add(key, replica, "", None)
        if row is not None and row.quarantined_at is None:
            row.failures, row.reason = 1, clean_text(reason)
            QuarantinedRecord.objects.filter(pk=row.pk).update(failures=1, reason=row.reason)
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
        """Replace the oldest row of a record by a count. Such a record is read no more; if it is,
        it has to fail again. Without one that is quarantined, others get room once those that
        failed before are quarantined or stored."""
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
        """Count a record in the row of its replica."""
        parts = row.key.split("/")[: 1 if row.replica_id is None else 2]
        key = f"{'/'.join(parts)}/{_SUMMARY}"
        whole, made = QuarantinedRecord.objects.get_or_create(
            run=self.run,
            key=key,
            defaults={
                "replica": row.replica,
                "first_at": row.first_at,
                "last_at": row.last_at,
                "quarantined_at": self.now,
            },
        )
        whole.failures, whole.last_at = whole.failures + 1, row.last_at
        whole.reason = clean_text(
            f"{whole.failures} more records were quarantined, the last of them {row.key}: "
            f"{row.reason}"
        )
        whole.save(update_fields=("failures", "last_at", "reason"))
        self._rows[key] = whole
        if made:
            record_event(
                self.run,
                "quarantined",
                f"more than {KEPT} records are quarantined; of {key} they are counted from now on",
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
    """A store whose records are read through a quarantine.

    A quarantined record is refused with :class:`BadRecord`. The keys that were read since the last
    commit (or :meth:`settle`) are *in hand*: if storing them fails, it is theirs (:meth:`blame`).
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
        """What is in hand has been stored."""
        self.quarantine.done(self._in_hand)
        self._in_hand.clear()

    def blame(self, error: BaseException) -> None:
        for key, size_bytes in self._in_hand.items():
            parsed = keys.parse_contribution_record(key)
            replica = parsed and self.quarantine.run.replicas.filter(number=parsed[1]).first()
            self.quarantine.failed(key, error, replica=replica or None, size_bytes=size_bytes)
        self._in_hand.clear()

    def _acquit(self) -> None:
        """What is in hand was not stored, and not because of what it holds."""
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
        self.quarantine.begin(key)  # reading alone can take more memory than there is
        began = self._clock()
        try:
            self._check_patience(key)
            data = read()
        except NotAnObject as error:  # of a shared folder; a record like one that cannot be read
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
            self._acquit()
            raise Unreadable(f"{key}: {type(error).__name__}: {error}") from error
        finally:
            self._requests += 1
            self._waited_s += self._clock() - began
        self._in_hand[key] = len(data)
        return data

    def _check_patience(self, what: str) -> None:
        """Raises :class:`OutOfTime` where many requests took the time of the pass, and
        :class:`StoreUnavailable` where a few did."""
        if self._waited_s < self._patience_s:
            return
        if self._waited_s < QUICK_S * self._requests:
            raise OutOfTime(f"{what}: {self._requests} requests took {self._waited_s:.0f} s")
        raise StoreUnavailable(f"{what}: the store took too long for the records before")

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

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        self.inner.put_stream(key, make_parts)

    def create(self, key: str, data: Data) -> bool:
        return self.inner.create(key, data)

    def delete(self, names: Iterable[str]) -> None:
        self.inner.delete(names)


def _begins_a_unit(key: str) -> bool:
    """A round is stored with its commit, a checkpoint with its manifest."""
    return key.endswith("/commit.json") or keys.parse_checkpoint_manifest(key) is not None
