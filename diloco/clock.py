"""Clocks, passed in wherever the library needs the time.

Clocks of two machines are never compared (invariant I5). Decisions use ``monotonic``; ``wall`` only
labels records that people read.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that tests can replace."""

    def wall(self) -> float:
        """Seconds since the epoch, for display only."""
        ...

    def monotonic(self) -> float:
        """Seconds that never decrease, for decisions."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block for ``seconds``."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))
