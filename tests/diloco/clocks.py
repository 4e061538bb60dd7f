"""Clocks of the tests, in place of :class:`diloco.clock.SystemClock`."""

from __future__ import annotations

import time
from collections.abc import Callable


class ManualClock:
    """Time passes only in sleeps. They return after ``meanwhile``, and ``pauses`` records them."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.meanwhile = meanwhile

    def wall(self) -> float:
        return 1e9 + self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
        self.meanwhile()


class FastClock:
    """A clock that runs fifty times as fast as real time, so that waits are short."""

    speed = 50.0

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic() * self.speed

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / self.speed)
