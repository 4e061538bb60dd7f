"""Import the SDKs of backends before their first use.

``modal``, ``kubernetes`` and ``boto3`` take seconds to import, more than ten on a busy machine.
That time must not count against the timeout of a request. A server therefore imports the SDKs in a
thread at startup (:func:`warm_up`), and a caller with a timeout first waits for the import
(:func:`wait_loaded`), which has its own timeout.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from executors.registry import BACKENDS, executor_class

WAIT_S = 8.0
"""Default timeout of :func:`wait_loaded`."""


class Loader:
    """Imports each backend once, one after the other, in a daemon thread."""

    def __init__(self, load: Callable[[str], object] = executor_class) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[str] = []
        self._loaded: set[str] = set()
        self._thread: threading.Thread | None = None

    def warm_up(self, backends: Iterable[str] = tuple(BACKENDS)) -> None:
        """Import the SDKs of ``backends`` in the background."""
        with self._lock:
            self._enqueue([name for name in backends if name in BACKENDS])

    def wait_loaded(self, backends: Iterable[str], *, patience_s: float = WAIT_S) -> set[str]:
        """Wait until ``backends`` are imported. Returns those that are not at the timeout.

        An SDK that is not installed counts as loaded: its first use raises the reason.
        """
        needed = {name for name in backends if name in BACKENDS}
        until = time.monotonic() + patience_s
        with self._lock:
            self._enqueue(sorted(needed - self._loaded), first=True)
            while needed - self._loaded:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return needed - self._loaded

    def _enqueue(self, backends: list[str], *, first: bool = False) -> None:
        new = [name for name in backends if name not in self._loaded]
        others = [name for name in self._queue if name not in new]
        self._queue = [*new, *others] if first else [*others, *new]
        if self._queue and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="load-backends", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                name = self._queue[0]
            with contextlib.suppress(Exception):  # the first use raises it to its caller
                self._load(name)
            with self._lock:
                self._loaded.add(name)
                self._queue = [other for other in self._queue if other != name]
                self._changed.notify_all()


_loader = Loader()
warm_up = _loader.warm_up
wait_loaded = _loader.wait_loaded
