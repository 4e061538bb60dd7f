"""Leaving of one's own accord: whether a replica is to leave, why, and how it spends the time.

It is asked by a signal, by a ``drain`` command or by its own caller, and told how long it has. For
the first half it goes on with its inner steps, and a round that ends by then is contributed whole.
Then it contributes what it has. The last part is for saving its own state: the optimizer is the
largest thing that it uploads.
"""

from __future__ import annotations

from diloco.clock import Clock

STEP_SHARE = 0.5
"""Of the time, after which no further inner step is made and no round waited for as usual."""
BASE_SHARE = 0.65
"""After which an open round is given up whose commit would be the base of what came since."""
COMMIT_SHARE = 0.8
"""After which nothing is waited for."""


class Departure:
    """``share`` is how much of the time may be over before :meth:`is_over` says so; whoever leaves
    sets it, stage by stage. ``begun`` is set with the first round: before it there is nothing to
    finish, and :meth:`is_over` is true at once.

    Without a lock, as it is asked in signal handlers.
    """

    def __init__(self, clock: Clock) -> None:
        self.share = STEP_SHARE
        self.begun = False
        self.reason = ""
        self._clock = clock
        self._asked: tuple[float, float] | None = None

    def ask(self, *, within_s: float = 0.0, reason: str = "") -> None:
        """Ask to leave, at the latest in ``within_s`` seconds. Asked again, the sooner end counts.

        ``reason`` stands in the last beat.
        """
        now_s, asked = self._clock.monotonic(), self._asked
        if asked is None or now_s + within_s < sum(asked):
            self.reason = reason
            self._asked = (now_s, within_s)

    @property
    def asked(self) -> bool:
        return self._asked is not None

    @property
    def left_s(self) -> float:
        """How much of the time is left, if it was asked."""
        return max(0.0, sum(self._asked or (0.0, 0.0)) - self._clock.monotonic())

    def is_over(self, share: float | None = None) -> bool:
        """Whether it is to leave and ``share`` (by default its own) of the time has passed."""
        if self._asked is None:
            return False
        asked_s, within_s = self._asked
        share = self.share if share is None else share
        return not self.begun or self._clock.monotonic() >= asked_s + share * within_s
