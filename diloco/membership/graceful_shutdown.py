"""Graceful shutdown of a replica: the request, its reason and its schedule.

A signal, a ``drain`` command or the caller requests the shutdown and sets its deadline. For the
first half of the time the replica continues with inner steps, and contributes rounds that end by
then. Then it contributes the steps it has. The rest of the time is for saving its state: the
optimizer state is the largest object that it uploads.
"""

from __future__ import annotations

from diloco.clock import Clock

STEP_SHARE = 0.5
"""Share of the time after which the replica makes no further inner step and closes no round."""
BASE_SHARE = 0.65
"""Share of the time after which it no longer waits for the bases of later steps."""
COMMIT_SHARE = 0.8
"""Share of the time after which it waits for nothing."""


class GracefulShutdown:
    """A shutdown request and its schedule.

    :meth:`is_over` is true once ``share`` of the time has passed; the drain raises the share stage
    by stage. ``begun`` is set with the first round; before it there is nothing to contribute, and
    :meth:`is_over` is true at once. There is no lock, because signal handlers call this class.
    """

    def __init__(self, clock: Clock) -> None:
        self.share = STEP_SHARE
        self.begun = False
        self.reason = ""
        self._clock = clock
        self._requested: tuple[float, float] | None = None

    def request(self, *, within_s: float = 0.0, reason: str = "") -> None:
        """Request a shutdown within ``within_s`` seconds. Of several requests the one with the
        earliest deadline applies. ``reason`` is shown in the last heartbeat.
        """
        now_s, requested = self._clock.monotonic(), self._requested
        if requested is None or now_s + within_s < sum(requested):
            self.reason = reason
            self._requested = (now_s, within_s)

    @property
    def is_requested(self) -> bool:
        return self._requested is not None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 without a request."""
        return max(0.0, sum(self._requested or (0.0, 0.0)) - self._clock.monotonic())

    def is_over(self, share: float | None = None) -> bool:
        """Return whether a shutdown is requested and ``share`` (default: :attr:`share`) of the time
        has passed."""
        if self._requested is None:
            return False
        requested_s, within_s = self._requested
        share = self.share if share is None else share
        return not self.begun or self._clock.monotonic() >= requested_s + share * within_s
