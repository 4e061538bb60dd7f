"""The parts that this process has in flight: about as many as fill the line, and at most
:data:`BYTES_IN_FLIGHT`.

One :class:`Line` for uploads and one for downloads serve all stores and rounds of a process, so a
round begins with the limit that the last one found (:mod:`diloco.store.transfer_limit`). Downloads
are measured part by part. A client that divides its uploads itself is measured object by object.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from diloco.clock import Clock, SystemClock
from diloco.store.base import PART_BYTES, StoreUnavailable
from diloco.store.multipart import Data
from diloco.store.transfer_limit import (
    LimitState,
    failed,
    first_state,
    observed,
)

BYTES_IN_FLIGHT = 384 * 2**20
"""Memory for the parts of one direction, requested and not yet taken by their reader."""
PARTS_IN_FLIGHT = BYTES_IN_FLIGHT // PART_BYTES
READ_AHEAD = 2
"""Parts that are held, in transfer or waiting for their reader, over the limit."""
EXPECTED_SHARE = 0.75
"""Share of the memory for a reader whose parts are not yet required. The rest stays for others."""
SATURATED = 0.75
"""Share of the limit that must have been in flight during a transfer for it to count as a
measurement of that limit."""
LAST_PARTS = 4
"""A reader that has the line alone begins its last parts together if that exceeds the limit by at
most the limit over this number, so that no few remain at the end, which do not fill the line."""
FEWEST_PARTS = 4
"""Parts of one observation; as many as the limit if that is more."""
BACK_OFF_S = 1.0
"""Errors within this time count once: one overload fails many parts."""


@dataclass(frozen=True)
class Flight:
    """One part in transfer. ``area`` is the integral of the parts in flight when it began, and
    ``changes`` the number of changes of the limit until then."""

    size_bytes: int
    begun_s: float
    area: float
    changes: int


@dataclass
class StreamedObject:
    """One object in transfer: at most ``limit`` of its parts at a time."""

    limit: int
    parts: int = 0
    size_bytes: int = 0

    def counted(self, parts: Iterable[Data]) -> Iterator[Data]:
        """Yield ``parts`` and count them."""
        for part in parts:
            self.parts += 1
            self.size_bytes += len(part)
            yield part


class Line:
    """One direction of the line to the stores. Safe for use by several threads.

    ``budget_bytes`` bounds the memory of parts that were requested and not yet taken.
    """

    def __init__(
        self, *, clock: Clock, most: int = PARTS_IN_FLIGHT, budget_bytes: int = BYTES_IN_FLIGHT
    ) -> None:
        self._clock = clock
        self._budget_bytes = budget_bytes
        self._state = first_state(most)
        self._changes = 0
        self._reset_transfers()

    def _reset_transfers(self) -> None:
        """Forget all transfers; the limit stays."""
        self._lock = threading.Lock()
        self._held = self._held_bytes = 0
        self._in_flight = 0
        self._refused: dict[Callable[[], bool], None] = {}
        self._objects_begun = 0
        self._granted = 0
        self._area = 0.0
        self._area_s = self._clock.monotonic()
        self._error_s: float | None = None
        self._reset_sample()

    def _reset_sample(self) -> None:
        self._sampled = 0
        self._weighted_bytes = self._seconds = 0.0

    @property
    def limit(self) -> int:
        """The parts to have in flight now."""
        return self._state.limit

    @property
    def most(self) -> int:
        """The largest limit."""
        return self._state.most

    # -- part by part ----------------------------------------------------------------------------

    def begin(
        self,
        size_bytes: int,
        *,
        alone: bool,
        held: int = 0,
        left: int = 0,
        share: float = 1.0,
        retry: Callable[[], bool] | None = None,
    ) -> Flight | None:
        """Begin the transfer of a part, or return None if the line or the budget is full.

        A reader that has no part at all (``alone``) always gets one, so that every reader makes
        progress. :meth:`end` and :meth:`release` must follow.

        Args:
            held: Parts of this reader that were requested and not yet taken.
            left: Its parts that have not begun, with this one; 0 if their number is unknown.
            share: Of the memory for parts, as a fraction: all readers together hold no more when
                this part begins.
            retry: After a refusal, called once when another reader leaves room
                (:meth:`offer_room`). It returns whether it returned the room that it took.
        """
        with self._lock:
            held_bytes = self._held_bytes + size_bytes
            limit = self._state.limit
            last = self._in_flight + left
            is_only = held == self._held and not self._state.needs_rate
            if left and is_only and last <= limit + limit // LAST_PARTS:
                limit = min(last, self._state.most)
            is_full = self._is_full(limit, share) or held_bytes > share * self._budget_bytes
            if is_full and not alone:
                if retry is not None:
                    self._refused[retry] = None
                return None
            now_s = self._advance()
            self._in_flight += 1
            self._held += 1
            self._held_bytes += size_bytes
            return Flight(size_bytes, now_s, self._area, self._changes)

    def end(self, flight: Flight, *, complete: bool) -> None:
        """End the transfer of a part. Only a complete one is measured."""
        with self._lock:
            seconds = self._advance() - flight.begun_s
            self._in_flight -= 1
            if not complete or seconds <= 0 or flight.changes != self._changes:
                return
            in_flight = (self._area - flight.area) / seconds
            if in_flight < SATURATED * self._state.limit:
                return
            self._sampled += 1
            self._seconds += seconds
            # More than the limit must not make the limit look faster: a higher one would not pay.
            self._weighted_bytes += min(in_flight, self._state.limit) * flight.size_bytes
            if self._sampled >= max(FEWEST_PARTS, self._state.limit):
                self._change(observed(self._state, self._weighted_bytes / self._seconds))
                self._reset_sample()

    def release(self, size_bytes: int) -> None:
        """Return the memory of a part that its reader has taken or dropped."""
        with self._lock:
            self._held -= 1
            self._held_bytes -= size_bytes

    def offer_room(self) -> None:
        """Call the readers that were refused, if the line has room. The caller holds no lock that
        they need."""
        with self._lock:
            if self._is_full(self._state.limit):
                return
            refused, self._refused = self._refused, {}
        returned = [retry() for retry in refused]
        if any(returned):
            self.offer_room()

    def forget(self, retry: Callable[[], bool]) -> None:
        """Do not call a reader that has ended."""
        with self._lock:
            self._refused.pop(retry, None)

    def _is_full(self, limit: int, share: float = 1.0) -> bool:
        return self._in_flight >= limit or self._held >= share * READ_AHEAD * self._state.limit

    def _advance(self) -> float:
        now_s = self._clock.monotonic()
        self._area += self._in_flight * (now_s - self._area_s)
        self._area_s = now_s
        return now_s

    # -- object by object ------------------------------------------------------------------------

    @contextlib.contextmanager
    def measured(self, parts: int | None = None) -> Iterator[StreamedObject]:
        """Measure the transfer of one object, of ``parts`` if they are known, by a client that
        divides it itself. Several at a time share the limit and are not measured. One that needs
        no measurement can have more in flight, for equal turns."""
        with self._lock:
            limit = max(1, self._state.limit - self._granted)
            alone = self._granted == 0
            in_flight = self._state.in_flight(parts) if parts and alone else limit
            self._granted += in_flight
            self._objects_begun += 1
            begun, changes = self._objects_begun, self._changes
            started_s = self._clock.monotonic()
        stream = StreamedObject(in_flight)
        complete = False
        try:
            yield stream
            complete = True
        except StoreUnavailable:
            self.back_off()
            raise
        finally:
            with self._lock:
                self._granted -= in_flight
                seconds = self._clock.monotonic() - started_s
                alone = alone and (self._objects_begun, self._changes) == (begun, changes)
                if complete and alone and seconds > 0 and stream.parts >= SATURATED * limit:
                    rate = stream.size_bytes / seconds
                    found = observed(self._state, rate, parts=parts or 0, in_flight=in_flight)
                    self._change(found)

    # -- the limit -------------------------------------------------------------------------------

    def back_off(self) -> None:
        """Halve the limit after an error of the store."""
        with self._lock:
            now_s = self._clock.monotonic()
            if self._error_s is None or now_s - self._error_s >= BACK_OFF_S:
                self._error_s = now_s
                self._change(failed(self._state))
                self._reset_sample()

    def _change(self, state: LimitState) -> None:
        self._changes += state.limit != self._state.limit
        self._state = state

    def after_fork(self) -> None:
        """Forget the parent's transfers, whose threads do not exist in a forked child."""
        self._reset_transfers()


UPLOAD_LINE = Line(clock=SystemClock())
DOWNLOAD_LINE = Line(clock=SystemClock())

for _line in (UPLOAD_LINE, DOWNLOAD_LINE):
    os.register_at_fork(after_in_child=_line.after_fork)
