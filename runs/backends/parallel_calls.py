"""Call endpoints that can hang, each in its own thread, with a timeout.

After the timeout a call counts as unanswered, and its thread ends with the client's own timeout.
Calls must not use the database: connections belong to the caller's thread.

Two limits prevent a dead endpoint from blocking all threads of a process: the total number of calls
(:data:`AT_ONCE`) and the calls per place (:data:`PER_PLACE`). A place is a backend account or a
store.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

PATIENCE_S = 8.0
AT_ONCE = 48
"""Simultaneous calls per process, so that a user who repeats a request cannot exhaust threads."""
PER_PLACE = 12
"""Simultaneous calls per process and place."""

T = TypeVar("T")
_places = threading.BoundedSemaphore(AT_ONCE)


class CallTimeout(Exception):
    """A call did not return within its timeout."""


class _PlaceLimit:
    """Limits the calls per place."""

    def __init__(self) -> None:
        self._busy: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def acquire(self, place: Hashable, most: int) -> bool:
        with self._lock:
            if self._busy[place] >= most:
                return False
            self._busy[place] += 1
            return True

    def release(self, place: Hashable) -> None:
        with self._lock:
            self._busy[place] -= 1
            if not self._busy[place]:
                del self._busy[place]


_limit = _PlaceLimit()


def _start(name: str, function: Callable[[], T], release: Callable[[], None]) -> Future[T]:
    """Run a function in a separate thread, which does not outlive the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            finish = partial(future.set_result, function())
        except BaseException as error:
            finish = partial(future.set_exception, error)
        release()
        finish()

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=f"call-{name}"[:60], daemon=True).start()
    return future


def _result(future: Future[T], patience_s: float, until: float) -> T:
    """The result of a call, or its exception; :class:`CallTimeout` if it still runs at ``until``
    (monotonic seconds)."""
    if not wait([future], max(until - time.monotonic(), 0.0)).done:
        raise CallTimeout(f"no answer within {patience_s:g} s")
    return future.result()


def begin(function: Callable[[], T], *, place: str, most: int) -> Future[T]:
    """Start ``function``, and return its future.

    Raises :class:`CallTimeout` if ``most`` calls of the place are unanswered.
    """
    if not _limit.acquire(place, most):
        raise CallTimeout(f"{most} requests to {place} are unanswered; not called again for now")
    return _start(place, function, lambda: _limit.release(place))


def call(function: Callable[[], T], *, place: str, patience_s: float) -> T:
    """Return or raise the outcome of ``function``.

    Raises :class:`CallTimeout` after ``patience_s``, or if too many calls of the place are
    unanswered.
    """
    until = time.monotonic() + patience_s
    return _result(begin(function, place=place, most=PER_PLACE), patience_s, until)


def call_all(
    questions: Mapping[str, Callable[[], T]], *, patience_s: float | None = None
) -> dict[str, T | Exception]:
    """Run functions in parallel: the result of each, or the exception that it raised.

    A function that has not returned after ``patience_s`` has the result :class:`CallTimeout`.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    until = time.monotonic() + patience_s
    results: dict[str, T | Exception] = {}
    calls: dict[str, Future[T]] = {}
    for name, function in questions.items():
        if _places.acquire(timeout=max(until - time.monotonic(), 0.0)):
            calls[name] = _start(name, function, _places.release)
        else:
            results[name] = CallTimeout("too many other checks are waiting for answers; try again")
    for name, running in calls.items():
        try:
            results[name] = _result(running, patience_s, until)
        except Exception as error:
            results[name] = error
    return {name: results[name] for name in questions}
