"""Ends a round early: a replica too slow for the grace window contributes the steps it has.

A round closes when its quorum is there and the grace window is over. With ``partial_rounds = on`` a
replica that still computes looks at the contributions of its round now and then. Once they are a
quorum, it compares the end of its steps and its upload with the end of the window. If it would miss
it, it ends its round at this step boundary, and contributes instead of being late.

Its contribution holds one round of work, whatever its number of steps; token weights count its
tokens. The steps that it does not make are not made up for: the next round begins with all others.

Cost: one listing each fifth of the heartbeat timeout until the quorum is seen.
"""

from __future__ import annotations

import logging

from diloco.clock import Clock
from diloco.exchange.round_observer import RoundObserver
from diloco.exchange.timings import Timings
from diloco.store.base import StoreError
from diloco.training.local_progress import LocalProgress

log = logging.getLogger(__name__)


class PartialRounds:
    """Decides at each step boundary whether the replica ends its round there. Its upload, which
    takes as long as the last one, must fit into the window too."""

    def __init__(
        self, progress: LocalProgress, round_observer: RoundObserver, clock: Clock
    ) -> None:
        settings = progress.settings
        self._progress = progress
        self._upload_s = 0.0
        self._is_on = settings.partial_rounds == "on"
        self._quorum = settings.min_quorum
        self._window_s = settings.grace_floor_s if settings.grace_gamma > 0 else settings.grace_s
        self._every_s = settings.heartbeat_timeout_s / 5
        self._round_observer = round_observer
        self._clock = clock
        self._round = 0
        self._looked_s = 0.0
        self._closes_s: float | None = None

    def contributed(self, timings: Timings) -> None:
        """Record the duration of a contribution."""
        self._upload_s = timings.seconds.get("encode", 0.0) + timings.seconds.get("upload", 0.0)

    def must_end(self, round: int, *, steps: int) -> bool:
        """Return whether the replica would miss the grace window of ``round`` with all ``steps``.

        Not in a round to which an earlier process has contributed.
        """
        counter = self._progress.counter
        made = counter.steps_in_round
        if not self._is_on or made >= steps or self._progress.earlier_contributor(round):
            return False
        now_s = self._clock.monotonic()
        if round != self._round:
            self._round, self._looked_s, self._closes_s = round, now_s, None
        if self._closes_s is None:
            self._look(now_s)
        if self._closes_s is None:
            return False
        left_s = (steps - made) * counter.compute_in_round_s / made
        return now_s + left_s + self._upload_s > self._closes_s

    def _look(self, now_s: float) -> None:
        """Look for a quorum. The window counts from the look before, because the quorum can have
        been there since."""
        if now_s < self._looked_s + self._every_s:
            return
        before_s, self._looked_s = self._looked_s, now_s
        try:
            found = self._round_observer.contributors(self._round)
        except StoreError as error:
            log.warning("cannot look for the quorum of round %d: %s", self._round, error)
            return
        if len(found) >= self._quorum:
            self._closes_s = before_s + self._window_s
