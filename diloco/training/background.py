"""Writes large objects in the background while the replica trains.

The tensors of a write must not change until it is complete. A checkpoint is read part by part from
the global weights and the outer state, which change at the next outer step only, so that step waits
for it. The inner optimizer changes at every step, so its state is copied before the write begins;
the next exchange waits for that write, so that the copy and the buffers of an exchange are not in
memory together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait

from diloco.clock import Clock, SystemClock
from diloco.errors import ReplicaError
from diloco.store.daemon import call_in_daemon

log = logging.getLogger(__name__)

CHECKPOINT, STATE, PACKS = "checkpoint", "replica state", "packs of old rounds"
"""The kinds of writes; one of each kind runs at a time."""
POLL_S = 1.0
OPTIONAL = (PACKS,)
"""The kinds that are cancelled when the process ends: a later process continues them."""
CANCELLED_S = 5.0
"""For how long a cancelled write is awaited. It ends at its next part, unless a request of the
store hangs."""


class WriteCancelled(Exception):
    """Control flow, not an error: the process ends before the write is complete."""


class BackgroundWrites:
    """The writes of one replica. All methods but :meth:`check` are for the training thread.

    A write without progress for ``longest_pause_s`` is given up by the thread that waits for it.
    """

    def __init__(
        self, *, clock: Clock | None = None, longest_pause_s: float = float("inf")
    ) -> None:
        self._clock = clock or SystemClock()
        self._longest_pause_s = longest_pause_s
        self._progress_s: dict[str, float] = {}
        self._running: dict[str, Future[None]] = {}
        self._cancelled: set[str] = set()

    def start(self, kind: str, write: Callable[[], None]) -> None:
        """Start a write, after the previous one of its kind."""
        self.finish(kind)
        self._progress_s[kind] = self._clock.monotonic()
        self._running[kind] = call_in_daemon(write, name="background_write")

    def is_running(self, kind: str) -> bool:
        """Return whether a write of this kind has been started and is not complete."""
        return kind in self._running and not self._running[kind].done()

    def finish(self, kind: str, check: Callable[[], None] = lambda: None) -> None:
        """Wait for the write of this kind, if there is one. Raises its exception, and those of
        ``check``, which is called meanwhile; then the write goes on. Raises :class:`ReplicaError`
        for a write that makes no progress."""
        running = self._running.get(kind)
        if running is None:
            return
        while not wait([running], timeout=POLL_S).done:
            check()
            if self._has_stalled(kind):
                raise ReplicaError(
                    f"expected the {kind} to be written, found no progress for "
                    f"{self._longest_pause_s:g} s: a request of the store hangs"
                )
        del self._running[kind]
        running.result()

    def _has_stalled(self, kind: str) -> bool:
        return self._clock.monotonic() - self._progress_s[kind] > self._longest_pause_s

    def check(self, kind: str) -> None:
        """Note progress of the write of this kind. Raises :class:`WriteCancelled` if the process
        gives up its writes. For the writes, before each part."""
        if kind in self._cancelled:
            raise WriteCancelled
        self._progress_s[kind] = self._clock.monotonic()

    def close(self, give_up: Callable[[], bool]) -> None:
        """Cancel the writes that are :data:`OPTIONAL`. Wait for the others until ``give_up``
        returns True or one of them makes no progress, then cancel them and wait for
        :data:`CANCELLED_S`. Failures are logged; readers ignore what is incomplete."""
        writes = list(self._running.items())
        self._cancelled.update(OPTIONAL)
        needed = [(kind, write) for kind, write in writes if kind not in OPTIONAL]
        while len(wait([write for _, write in needed], timeout=POLL_S).done) < len(needed):
            if give_up() or any(
                self._has_stalled(kind) for kind, write in needed if not write.done()
            ):
                self._cancelled.update(kind for kind, _ in needed)
                break
        hanging = wait(self._running.values(), timeout=CANCELLED_S).not_done
        for kind, write in writes:
            if write in hanging:
                log.error("the %s is not complete: a request of the store hangs", kind)
                continue
            error = write.exception()
            if isinstance(error, WriteCancelled):
                log.warning("the %s is not complete: the process ends", kind)
            elif error is not None:
                log.error("the %s could not be written: %s", kind, error)
        self._running.clear()
