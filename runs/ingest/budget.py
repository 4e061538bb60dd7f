"""Limits of one ingest pass over one run: wall time, CPU time, bytes, segments and log lines.

A pass stops when one limit is reached; later passes read the rest. A run that writes a lot
therefore delays other runs by at most one budget. The budget cannot interrupt a single record: the
time limits of the ingest task do that (:mod:`runs.tasks`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SECONDS = 10.0
CPU_SECONDS = 8.0
BYTES = 64 * 1024 * 1024
SEGMENTS = 2000
STORE_SECONDS = 10.0
"""Extra time to store what was parsed before the other limits were reached."""
LOG_LINES = 20_000
"""Rows of one transaction. It blocks every other writer of SQLite."""


class Budget:
    """Consumed by all threads of one pass."""

    def __init__(
        self,
        *,
        seconds: float = SECONDS,
        cpu_seconds: float = CPU_SECONDS,
        size_bytes: int = BYTES,
        segments: int = SEGMENTS,
        lines: int = LOG_LINES,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._store_until = clock() + seconds + STORE_SECONDS
        self._until, self._cpu_until = clock() + seconds, cpu_clock() + cpu_seconds
        self._bytes, self._segments = size_bytes, segments
        self._lines = lines
        self._lock = threading.Lock()

    def has_time(self) -> bool:
        return self._clock() < self._until and self._cpu_clock() < self._cpu_until

    def can_store(self) -> bool:
        """Whether one more transaction can begin."""
        return self._clock() < self._store_until

    def has_room(self) -> bool:
        """Whether one more segment can be fetched."""
        return self.has_time() and self._bytes > 0 and self._segments > 0

    def has_lines(self) -> bool:
        return self._lines > 0

    def use_lines(self, count: int) -> None:
        self._lines -= count

    def use(self, size_bytes: int) -> None:
        with self._lock:
            self._bytes -= size_bytes
            self._segments -= 1


class Unlimited(Budget):
    """No limits. Used by imports, which run until everything is read."""

    def __init__(self) -> None:
        super().__init__()

    def has_time(self) -> bool:
        return True

    def can_store(self) -> bool:
        return True

    def has_room(self) -> bool:
        return True

    def has_lines(self) -> bool:
        return True
