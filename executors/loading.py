"""Import the clients of backends ahead of their use.

``modal``, ``kubernetes`` and ``boto3`` take seconds to import, ten and more on a busy machine. That
time must not count against the time limit of a request: a server imports the clients in a thread
when it starts (:func:`warm_up`), and a caller with a time limit first waits for the import
(:func:`wait_loaded`), which has a limit of its own and goes on when that is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from executors.registry import CLASSES, executor_class

WAIT_S = 8.0
"""How long :func:`wait_loaded` waits by default."""


class Loader:
    """Imports each backend once, one after the other, in a thread that ends with the process."""

    def __init__(self, load: Callable[[str], object] = executor_class) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wanted: list[str] = []
        self._loaded: set[str] = set()
        self._thread: threading.Thread | None = None

    def warm_up(self, backends: Iterable[str] = tuple(CLASSES)) -> None:
        """Import their clients in the background."""
        with self._lock:
            self._want([name for name in backends if name in CLASSES])

    def wait_loaded(self, backends: Iterable[str], *, patience_s: float = WAIT_S) -> set[str]:
        """Wait until they are imported; those that are not when the time is over. A client that is
        not installed counts as loaded: using it reports why."""
        needed = {name for name in backends if name in CLASSES}
        until = time.monotonic() + patience_s
        with self._lock:
            self._want(sorted(needed - self._loaded), first=True)
            while needed - self._loaded:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return needed - self._loaded

    def _want(self, backends: list[str], *, first: bool = False) -> None:
        new = [name for name in backends if name not in self._loaded]
        others = [name for name in self._wanted if name not in new]
        self._wanted = [*new, *others] if first else [*others, *new]
        if self._wanted and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="load-backends", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                name = self._wanted[0]
            with contextlib.suppress(Exception):  # the first use raises it where it can be shown
                self._load(name)
            with self._lock:
                self._loaded.add(name)
                self._wanted = [other for other in self._wanted if other != name]
                self._changed.notify_all()


_loader = Loader()
warm_up = _loader.warm_up
wait_loaded = _loader.wait_loaded
