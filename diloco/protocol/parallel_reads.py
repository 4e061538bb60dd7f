"""Parallel reads, a bounded number of bytes ahead of the consumer.

The reduce reads every payload range by range in a fixed order; over a network, one request at a
time leaves most of the bandwidth unused. Retries and verification are left to the store
(:class:`diloco.store.retry.RetryingStore`) and to the caller.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from diloco.clock import Clock
from diloco.protocol.records import BadRecord, Record
from diloco.store.base import MissingKey, Store, StoreUnavailable
from diloco.store.daemon import DaemonPool
from diloco.store.transfers import DOWNLOAD_LINE, EXPECTED_SHARE, Flight, Line

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
A = TypeVar("A")
T = TypeVar("T")

RECORDS_IN_FLIGHT = 8
"""Small objects that :func:`read_each` reads at once."""
FIRST_POLL_S, LONGEST_POLL_S = 0.03, 0.2
"""Pauses after such a poll."""

Parts: TypeAlias = Generator[bytes, None, None]
Range: TypeAlias = tuple[str, int, int]
"""Key, start and length in bytes."""


def read_parts(store: Store, requests: Iterable[Range], *, line: Line = DOWNLOAD_LINE) -> Parts:
    """Yield the ranges in the requested order, reading ahead as many as ``line`` allows.

    The ranges that are in memory, without the caller's, have at most the bytes of the line's
    budget; a larger range is read alone. The exception of a read is raised in its range's position,
    after every earlier range. When the iterator ends, fails or is closed, the reads and their
    threads have ended. Callers close it (``contextlib.closing``): an exception that is kept would
    keep an open one. If the system starts no further thread, fewer ranges are read ahead, and none
    is read ahead without any thread.
    """
    yield from _parts(_ReadAhead(store, requests, line))


def _parts(ahead: _ReadAhead) -> Parts:
    with contextlib.closing(ahead):
        while (part := ahead.take()) is not None:
            yield part


class ExpectedReads:
    """Ranges of objects that are expected soon, read before it is certain that they are needed.

    Objects are polled, one byte each, and read once they are there; one of a single range is polled
    by reading it, unless the line is full. After ``polls`` that found nothing, the others are left
    to :meth:`parts_of`. Without ``polls`` they exist. Memory and threads are bounded as in
    :func:`read_parts`.
    """

    def __init__(
        self,
        store: Store,
        requests: Sequence[Range],
        *,
        clock: Clock,
        polls: int | None,
        line: Line = DOWNLOAD_LINE,
    ) -> None:
        self._requests = list(requests)
        self._is_taken = False
        ranges = Counter(key for key, _, _ in self._requests)
        single = {request[0]: request for request in self._requests if ranges[request[0]] == 1}
        poll = None if polls is None else _Polls(clock, polls, single)
        self._ahead = _ReadAhead(store, self._requests, line, poll)
        self._ahead.expect(dict.fromkeys(key for key, _, _ in self._requests))

    def parts_of(self, requests: Sequence[Range]) -> Parts | None:
        """Yield the ranges as :func:`read_parts` does, from now on with :class:`MissingKey` for a
        missing object. Returns None, and ends the reads, if other ranges were expected or if they
        were taken before."""
        if self._is_taken or list(requests) != self._requests:
            self.close()
            return None
        self._is_taken = True
        self._ahead.require()
        return _parts(self._ahead)

    def close(self) -> None:
        """End the reads."""
        self._is_taken = True
        self._ahead.close()


@dataclass
class _Polls:
    """The state of the objects that are expected; guarded by the lock of their reader."""

    clock: Clock
    left: int
    single: dict[str, Range]
    """The range of each object of which only one is read. A larger object is read faster if its
    ranges do not wait for the first one."""
    tasks: dict[str, Future[None]] = field(default_factory=dict)
    """Those that poll, by object."""
    looking: set[str] = field(default_factory=set)
    """Objects that are being looked for."""
    found: set[str] = field(default_factory=set)
    read: dict[Range, Future[bytes]] = field(default_factory=dict)
    """Ranges that polls have read, not yet taken by their reader."""
    is_over: bool = False
    """All ranges are required now, so a missing object is an error."""


@dataclass
class _Read:
    """One range that is read. ``is_dropped``: no thread was started for it, so it is read later;
    the executor can still have it in its queue."""

    request: Range
    flight: Flight
    is_dropped: bool = False


class _ReadAhead:
    """The reads of one :func:`read_parts`. A read that ends begins the next one, of this reader or
    of another one on the same line, so that the line stays full while the consumer works."""

    def __init__(
        self, store: Store, requests: Iterable[Range], line: Line, polls: _Polls | None = None
    ) -> None:
        self._store = store
        self._polls = polls
        self._requests = deque(requests)  # no code of the caller runs in other threads
        self._line = line
        self._share = 1.0
        self._pool = DaemonPool(line.most, "read_parts")
        self._lock = threading.Lock()
        self._ahead: deque[tuple[Range, Future[bytes]]] = deque()
        self._closed = False
        self._has_dropped = False

    @property
    def _next(self) -> Range | None:
        """The first range that has not begun."""
        return self._requests[0] if self._requests else None

    def take(self) -> bytes | None:
        """Return the next range, None after the last one."""
        self.fill()
        with self._lock:
            request, reading = self._ahead[0] if self._ahead else (self._next, None)
            polling = self._looking_for(request) if reading is None else None
            if request is not None and reading is None and polling is None:
                self._requests.popleft()
        if request is None:
            return None
        if polling is not None:
            polling.exception()  # wait
            return self.take()
        if reading is None:
            return self._read_here(request)
        reading.exception()  # wait
        with self._lock:
            self._ahead.popleft()
        self._line.release(request[2])
        self.fill()
        return reading.result()

    def expect(self, keys: Iterable[str]) -> None:
        """Begin to poll the objects, or to read them. Until :meth:`require` they have only a share
        of the memory."""
        with self._lock:
            self._share = EXPECTED_SHARE
            for key in keys:
                self._can_begin(key)
        self.fill()

    def require(self) -> None:
        """Read all ranges; a missing object is an error from now on."""
        with self._lock:
            self._share = 1.0
            if self._polls is not None:
                self._polls.is_over = True
        self.fill()

    def close(self) -> None:
        """Cancel the reads that have not begun, and wait for the others."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True)
        polled = self._polls.read if self._polls else {}
        for _, _, size_bytes in (*polled, *(request for request, _ in self._ahead)):
            self._line.release(size_bytes)
        polled.clear()
        self._ahead.clear()
        self._line.forget(self._begin)
        self._line.offer_room()

    def fill(self) -> None:
        """Begin as many reads as the line allows, and leave the rest to other readers."""
        self._begin()
        self._line.offer_room()

    def _begin(self) -> bool:
        """Begin reads; return whether one was dropped, so that the line has its room again."""
        with self._lock:
            while self._next is not None and not self._closed:
                request = self._next
                if self._polls and (polled := self._polls.read.pop(request, None)):
                    self._ahead.append((self._requests.popleft(), polled))
                    continue
                if not self._can_begin(request[0]):
                    return False
                flight = self._line.begin(
                    request[2],
                    alone=not self._ahead,
                    held=len(self._ahead),
                    left=len(self._requests),
                    share=self._share,
                    retry=self._begin,
                )
                if flight is None:
                    return False
                read = _Read(request, flight)
                try:
                    reading = self._pool.submit(self._read_in_thread, read)
                except (RuntimeError, MemoryError) as error:  # the system starts no further thread
                    self._drop(read, error)
                    return True
                self._ahead.append((self._requests.popleft(), reading))
            return False

    def _drop(self, read: _Read, error: RuntimeError | MemoryError) -> None:
        read.is_dropped = True
        self._line.end(read.flight, complete=False)
        self._line.release(read.flight.size_bytes)
        if not self._has_dropped:
            log.warning("fewer parts are read at once: %s", error)
        self._has_dropped = True

    def _read_in_thread(self, read: _Read) -> bytes:
        with self._lock:  # `submit` has returned
            if read.is_dropped:
                return b""
        return self._read(read.request, read.flight)

    def _can_begin(self, key: str) -> bool:
        """Return whether the object exists or is required, and no poll reads it; begin to poll it
        otherwise."""
        polls = self._polls
        if polls is None or key in polls.found:
            return True
        if key in polls.looking:
            return False
        if not polls.is_over and key not in polls.tasks:
            with contextlib.suppress(RuntimeError):  # the system starts no further thread
                polls.tasks[key] = self._pool.submit(self._poll, polls, key)
        return polls.is_over

    def _looking_for(self, request: Range | None) -> Future[None] | None:
        """Return the poll that reads a range now."""
        polls = self._polls
        if polls is None or request is None or request[0] not in polls.looking:
            return None
        return polls.tasks[request[0]]

    def _poll(self, polls: _Polls, key: str) -> None:
        """Look for an object until it is there, or all objects are required, or too many looks have
        found nothing."""
        pause_s = FIRST_POLL_S
        while True:
            with self._lock:
                if polls.is_over or self._closed or polls.left <= 0:
                    return
                polls.left -= 1
                polls.looking.add(key)
                request = polls.single.get(key)
                flight = self._line.begin(request[2], alone=False) if request else None
            if self._look(polls, key, flight) or polls.is_over:
                return
            polls.clock.sleep(pause_s)
            pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)

    def _look(self, polls: _Polls, key: str, flight: Flight | None) -> bool:
        """Read the only range of an object, or without a ``flight`` one byte; return whether the
        object is there."""
        request = polls.single[key] if flight else (key, 0, 1)
        data: bytes | None = None
        with contextlib.suppress(Exception):  # a read that is required raises it
            data = self._store.get_range(*request)
        with self._lock:
            polls.looking.discard(key)
            if data is not None:
                polls.left += 1
                polls.found.add(key)
            if flight is not None:
                self._line.end(flight, complete=data is not None)
                if data is None:
                    self._line.release(request[2])
                else:
                    read: Future[bytes] = Future()
                    read.set_result(data)
                    polls.read[request] = read
        self.fill()
        return data is not None

    def _read_here(self, request: Range) -> bytes:
        """Read a range in the calling thread, because no other one could be started."""
        flight = self._line.begin(request[2], alone=True)
        assert flight is not None
        try:
            return self._read(request, flight)
        finally:
            self._line.release(request[2])
            self._line.offer_room()

    def _read(self, request: Range, flight: Flight) -> bytes:
        complete = False
        try:
            data = self._store.get_range(*request)
            complete = True
            return data
        except StoreUnavailable:
            self._line.back_off()
            raise
        finally:
            self._line.end(flight, complete=complete)
            self.fill()


def read_each(store: Store, kind: type[R], keys: Sequence[str]) -> dict[str, R | BadRecord]:
    """Read records in parallel, so that their latencies on a distant bucket do not add up.

    A missing key is left out; an object that is not such a record maps to its :class:`BadRecord`;
    any other error is raised.
    """

    def get(key: str) -> R | BadRecord | None:
        try:
            return kind.read(store, key)
        except MissingKey:
            return None
        except BadRecord as error:
            return error

    results = call_each(get, keys)
    return {key: result for key, result in zip(keys, results, strict=True) if result is not None}


def run_both(first: Callable[[], A], second: Callable[[], T]) -> tuple[A, T]:
    """Call two functions at once, the first one in another thread; return both results."""
    with DaemonPool(1, "run_both") as pool:
        begun = pool.submit(first)
        result = second()
        return begun.result(), result


def call_each(function: Callable[[A], T], arguments: Sequence[A]) -> list[T]:
    """Return the result of ``function`` for each argument, a few calls at once."""
    if len(arguments) < 2:
        return [function(argument) for argument in arguments]
    with DaemonPool(min(RECORDS_IN_FLIGHT, len(arguments)), "read_each") as pool:
        calls = [pool.submit(function, argument) for argument in arguments]
        return [call.result() for call in calls]
