"""Questions to places that may be dead, asked all at once and not for ever.

A form waits for them: after :data:`PATIENCE_S` what has not answered is said to have not, and its
thread is left to its client's own time limit. Answers must not touch the database: its connections
belong to the thread of the request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

PATIENCE_S = 8.0
AT_ONCE = 48
"""Questions of one process, so that a button that is pressed again and again holds only so many
threads."""

T = TypeVar("T")
_places = threading.BoundedSemaphore(AT_ONCE)


class NoAnswer(Exception):
    """Nobody said anything in time."""


def ask_all(
    questions: Mapping[str, Callable[[], T]], *, patience_s: float | None = None
) -> dict[str, T | Exception]:
    """The answer to each question, or what it raised: :class:`NoAnswer` when the time was over."""
    patience_s = PATIENCE_S if patience_s is None else patience_s
    until = time.monotonic() + patience_s
    answers: dict[str, T | Exception] = {}
    open_ones: list[tuple[str, threading.Thread]] = []
    for name, question in questions.items():
        if not _places.acquire(timeout=max(until - time.monotonic(), 0.0)):
            answers[name] = NoAnswer("too many other checks are waiting for answers; try again")
            continue
        thread = threading.Thread(
            target=_ask, args=(name, question, answers, _places), name=f"ask-{name}", daemon=True
        )
        thread.start()
        open_ones.append((name, thread))
    for _, thread in open_ones:
        thread.join(max(until - time.monotonic(), 0.0))
    found = dict(answers)  # a late one changes nothing any more
    for name, _ in open_ones:
        found.setdefault(name, NoAnswer(f"no answer within {patience_s:g} s"))
    return {name: found[name] for name in questions}


def _ask(
    name: str,
    question: Callable[[], T],
    answers: dict[str, T | Exception],
    place: threading.BoundedSemaphore,
) -> None:
    try:
        answers[name] = question()
    except Exception as error:  # each place raises its own
        answers[name] = error
    finally:
        place.release()
