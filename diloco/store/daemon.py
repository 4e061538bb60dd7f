"""Calls in threads that do not delay the exit of the process.

The interpreter waits at its exit for the threads of every ``ThreadPoolExecutor``, however long a
request in one of them hangs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

T = TypeVar("T")


def call_in_daemon(function: Callable[[], T], *, name: str) -> Future[T]:
    """Call ``function`` in a new daemon thread ``name``; return its future. Raises
    :class:`RuntimeError` if the system starts no thread."""
    called: Future[T] = Future()
    threading.Thread(target=_call, args=([function], called), name=name, daemon=True).start()
    return called


def _call(functions: list[Callable[[], T]], called: Future[T]) -> None:
    """Call the only function of the list. Its objects, which can be tensors, are freed before the
    future is done: after that the process can end at any time. Those of a call that fails are in
    the traceback of its exception, and are freed with it."""
    try:
        result = functions.pop()()
    except BaseException as error:
        called.set_exception(error)
    else:
        called.set_result(result)
    finally:
        del called  # the traceback has this frame, and the future the exception: no cycle


class DaemonPool:
    """At most ``most`` calls at once, each in one of as many daemon threads. The part of
    ``ThreadPoolExecutor`` that the library uses."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], list[Callable[[], Any]]] | None]
        self._calls = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call ``function`` as soon as a thread is free. Raises :class:`RuntimeError` after
        :meth:`shutdown`, and if the system starts no thread."""
        called: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("expected an open pool, found one that was shut down")
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._calls.put((called, [lambda: function(*arguments)]))
        return called

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Start no further call; with ``cancel_futures`` drop those that have not begun, with
        ``wait`` wait for the others."""
        with self._lock:
            self._closed = True
            while cancel_futures and (call := self._next_waiting()) is not None:
                call[0].cancel()
                call[0].set_running_or_notify_cancel()  # for those that wait for it
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _next_waiting(self) -> tuple[Future[Any], list[Callable[[], Any]]] | None:
        try:
            return self._calls.get_nowait()
        except queue.Empty:
            return None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            called, functions = call
            del call
            if called.set_running_or_notify_cancel():
                _call(functions, called)
            del called, functions
            self._idle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.shutdown(cancel_futures=kind is not None)
