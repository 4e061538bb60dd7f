"""Calls in threads that do not delay the exit of the process.

The interpreter waits at its exit for the threads of every ``ThreadPoolExecutor``, however long a
request in one of them hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_in_daemon(function: Callable[[], T], *, name: str) -> Future[T]:
    """Call ``function`` in a new daemon thread ``name``; return its future. Raises
    :class:`RuntimeError` if the system starts no thread."""
    called: Future[T] = Future()
    threading.Thread(target=_call, args=([function], called), name=name, daemon=True).start()
    return called


def _call(functions: list[Callable[[], T]], called: Future[T]) -> None:
    """Call the only function of the list. Its objects, which can be tensors, are freed before the
    future is done: after that the process can end at any time."""
    try:
        result = functions.pop()()
    except BaseException as error:
        called.set_exception(error)
    else:
        called.set_result(result)
