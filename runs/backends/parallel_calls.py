"""Calls to places that may be dead: each in a thread of its own, and not for ever.

After its patience a call counts as unanswered and its thread is left to the client's own time
limit. Answers must not touch the database: its connections belong to the thread of the caller.

Two limits keep a dead place from taking all threads of a process: so many calls in all
(:data:`AT_ONCE`), and so many of one place (:data:`PER_PLACE`). A place is a backend's account or a
store.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

PATIENCE_S = 8.0
AT_ONCE = 48
"""Calls of one process, so that a button that is pressed again and again holds only so many
threads."""
PER_PLACE = 12
"""Calls of one process to one place."""

T = TypeVar("T")
_places = threading.BoundedSemaphore(AT_ONCE)


class NoAnswer(Exception):
    """There was no answer in time."""


class _PlaceLimit:
    """At most :data:`PER_PLACE` calls of each place."""

    def __init__(self) -> None:
        self._busy: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def acquire(self, place: Hashable) -> bool:
        with self._lock:
            if self._busy[place] >= PER_PLACE:
                return False
            self._busy[place] += 1
            return True

    def release(self, place: Hashable) -> None:
        with self._lock:
            self._busy[place] -= 1
            if not self._busy[place]:
                del self._busy[place]


_limit = _PlaceLimit()


class _Call(Generic[T]):
    """A function in a thread, and its outcome once there is one."""

    def __init__(self, name: str, function: Callable[[], T], release: Callable[[], None]) -> None:
        self._function, self._release = function, release
        self._outcome: tuple[T | None, BaseException | None] | None = None
        self._ended = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name=f"call-{name}"[:60], daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = (self._function(), None)
        except BaseException as error:
            self._outcome = (None, error)
        finally:
            self._release()
            self._ended.set()

    def outcome(self, until: float) -> tuple[Any, BaseException | None] | None:
        """Value and exception; None if there is no outcome at ``until`` (monotonic seconds)."""
        self._ended.wait(max(until - time.monotonic(), 0.0))
        return self._outcome


def call(function: Callable[[], T], *, place: str, patience_s: float) -> T:
    """What ``function`` returns or raises; :class:`NoAnswer` when it has not after ``patience_s``,
    or when too many calls of the place are unanswered."""
    if not _limit.acquire(place):
        raise NoAnswer(f"{PER_PLACE} requests to {place} are unanswered; not asked again for now")
    made = _Call(place, function, lambda: _limit.release(place))
    found = made.outcome(time.monotonic() + patience_s)
    if found is None:
        raise NoAnswer(f"no answer within {patience_s:g} s")
    value, error = found
    if error is not None:
        raise error
    result: T = value
    return result


def ask_all(
    questions: Mapping[str, Callable[[], T]], *, patience_s: float | None = None
) -> dict[str, T | Exception]:
    """The answer to each question, or what it raised: :class:`NoAnswer` when the time was over."""
    patience_s = PATIENCE_S if patience_s is None else patience_s
    until = time.monotonic() + patience_s
    answers: dict[str, T | Exception] = {}
    open_ones: dict[str, _Call[T]] = {}
    for name, question in questions.items():
        if not _places.acquire(timeout=max(until - time.monotonic(), 0.0)):
            answers[name] = NoAnswer("too many other checks are waiting for answers; try again")
            continue
        open_ones[name] = _Call(name, question, _places.release)
    for name, made in open_ones.items():
        found = made.outcome(until)
        if found is None:
            answers[name] = NoAnswer(f"no answer within {patience_s:g} s")
            continue
        value, error = found
        if error is not None and not isinstance(error, Exception):
            raise error
        answers[name] = error if isinstance(error, Exception) else value
    return {name: answers[name] for name in questions}
