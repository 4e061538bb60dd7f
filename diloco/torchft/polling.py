"""Polling with pauses that grow, a deadline, and an end when the Manager is shut down."""

from __future__ import annotations

import threading
from collections.abc import Callable

from diloco.clock import Clock

FIRST_PAUSE_S = 0.01


class ShutDown(RuntimeError):
    """The Manager was shut down while something waited."""


class MemberLost(RuntimeError):
    """A member of the round will not send what the others wait for."""


class Waiting:
    """One wait. ``stop`` ends it early, at its next pause; so does an exception of ``check``,
    which is called before each pause."""

    def __init__(
        self,
        clock: Clock,
        stop: threading.Event,
        *,
        timeout_s: float,
        longest_pause_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._stop = stop
        self._longest_pause_s = longest_pause_s
        self._check = check
        self._began_s = clock.monotonic()
        self._give_up_s = self._began_s + timeout_s
        self._pause_s = min(FIRST_PAUSE_S, longest_pause_s)

    @property
    def waited_s(self) -> float:
        return self._clock.monotonic() - self._began_s

    @property
    def out_of_time(self) -> bool:
        return self._clock.monotonic() >= self._give_up_s

    def pause(self) -> bool:
        """Sleep a little; False, without sleeping, when the deadline has passed."""
        if self._stop.is_set():
            raise ShutDown("the manager was shut down")
        self._check()
        left_s = self._give_up_s - self._clock.monotonic()
        if left_s <= 0:
            return False
        self._clock.sleep(min(self._pause_s, left_s))
        self._pause_s = min(self._longest_pause_s, 1.5 * self._pause_s)
        return True
