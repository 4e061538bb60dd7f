"""Graceful shutdown of a replica: the request, its reason and its schedule.

A signal, a ``drain`` command or the caller requests the shutdown and sets its deadline. For the
first half of the time the replica continues with inner steps, and contributes rounds that end by
then. Then it contributes the steps it has. The rest of the time is for saving its state: the
optimizer state is the largest object that it uploads.
"""

from __future__ import annotations

from typing import NamedTuple

from diloco.clock import Clock

STEP_SHARE = 0.5
"""Share of the time after which the replica makes no further inner step and closes no round."""
BASE_SHARE = 0.65
"""Share of the time after which it no longer waits for the bases of later steps."""
COMMIT_SHARE = 0.8
"""Share of the time after which it waits for nothing."""


class ShutdownRequest(NamedTuple):
    """A request at ``requested_s`` of the monotonic clock to leave within ``within_s`` seconds."""

    requested_s: float
    within_s: float
    reason: str

    @property
    def deadline_s(self) -> float:
        return self.requested_s + self.within_s


class GracefulShutdown:
    """A shutdown request and its schedule.

    :meth:`is_over` is true once ``share`` of the time has passed; the drain raises the share stage
    by stage. ``begun`` is set with the first round; before it there is nothing to contribute, and
    :meth:`is_over` is true at once. There is no lock, because signal handlers call this class.
    """

    def __init__(self, clock: Clock) -> None:
        self.share = STEP_SHARE
        self.begun = False
        self._clock = clock
        self._requests: list[ShutdownRequest] = []

    def request(self, *, within_s: float = 0.0, reason: str = "") -> None:
        """Request a shutdown within ``within_s`` seconds. Of several requests the one with the
        earliest deadline applies. ``reason`` is shown in the last heartbeat.
        """
        request = ShutdownRequest(self._clock.monotonic(), within_s, reason)
        if self._requested is None or request.deadline_s < self._requested.deadline_s:
            self._requests.append(request)

    @property
    def _requested(self) -> ShutdownRequest | None:
        # Not one attribute: a signal can arrive between the comparison above and its assignment.
        return min(self._requests, key=lambda request: request.deadline_s, default=None)

    @property
    def reason(self) -> str:
        """The reason of the request that applies, '' without one."""
        return self._requested.reason if self._requested else ""

    @property
    def is_requested(self) -> bool:
        return self._requested is not None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 without a request."""
        requested = self._requested
        return max(0.0, requested.deadline_s - self._clock.monotonic()) if requested else 0.0

    def is_over(self, share: float | None = None) -> bool:
        """Return whether a shutdown is requested and ``share`` (default: :attr:`share`) of the time
        has passed."""
        requested = self._requested
        if requested is None:
            return False
        share = self.share if share is None else share
        over_s = requested.requested_s + share * requested.within_s
        return not self.begun or self._clock.monotonic() >= over_s
