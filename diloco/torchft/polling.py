"""Polling with growing pauses and a deadline, which a shutdown of the Manager interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from diloco.clock import Clock
from diloco.store.base import MissingKey

T = TypeVar("T")

FIRST_PAUSE_S = 0.01


class ShutDown(RuntimeError):
    """The Manager was shut down during a wait."""


class MemberLost(RuntimeError):
    """A member of the round will not send the data for which the others wait."""


class Waiting:
    """One wait. It ends early, at its next pause, if ``stop`` is set or ``check`` raises;
    ``check`` is called before each pause."""

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
        """Sleep and return True; return False at once if the deadline has passed."""
        if self._stop.is_set():
            raise ShutDown("the manager was shut down")
        self._check()
        left_s = self._give_up_s - self._clock.monotonic()
        if left_s <= 0:
            return False
        self._clock.sleep(min(self._pause_s, left_s))
        self._pause_s = min(self._longest_pause_s, 1.5 * self._pause_s)
        return True

    def read(
        self, get: Callable[[], T], what: str, *, writer: str, why_lost: Callable[[], str]
    ) -> T:
        """Return the result of ``get`` once it raises no :class:`MissingKey`. ``why_lost`` returns
        why the ``writer`` will not write it, or ''.

        Raises :class:`MemberLost` or :class:`TimeoutError`.
        """
        while True:
            try:
                return get()
            except MissingKey:
                pass
            if why := why_lost():
                try:
                    return get()  # it can have been written just before
                except MissingKey:
                    raise MemberLost(f"{writer} {why}") from None
            if not self.pause():
                raise TimeoutError(f"expected {what} within {self.waited_s:.1f} s, found none")
