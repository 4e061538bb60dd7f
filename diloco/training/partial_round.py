"""Ends a round early: a replica too slow for the grace window contributes the steps it has.

A round closes when its quorum is there and the grace window is over. With ``partial_rounds = on`` a
replica that still computes, and that others wait for, looks at the contributions of its round now
and then. Once they are a quorum, it compares the end of its steps and its upload with the end of
the window. If it would miss it, it ends its round at this step boundary, and contributes instead of
being late. Without this rule it would begin the next round late as well, and miss rounds until the
windows for which the others wait in vain add up to its delay.

The first round of a process that joins a group in the middle of a round is shorter in any case. It
ends once all others have contributed, so that no replica waits for the rest. A group whose
processes all start again together makes whole rounds: no contribution is from a process that was
there before. Contributions that the earlier processes left in the round count only once the lease
of a contributor has changed, because no process waits with them otherwise.

The contribution holds one round of work, whatever its number of steps; token weights count its
tokens. The steps that it does not make are not made up for: the next round begins with all others.

A listing runs in a thread, and no step waits longer for it than :data:`LISTING_S`: a replica that
cannot reach the store computes on.

Cost: while others wait, one listing each fifth of the heartbeat timeout until the quorum is seen,
and each eighth of the window if that is longer; three times as many in the first round, whose first
seconds count too, because others can close it before they see this process.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future, wait

from diloco.clock import Clock
from diloco.exchange.round_observer import RoundObserver
from diloco.exchange.timings import Timings
from diloco.membership.lease import Lease
from diloco.membership.observer import Observer
from diloco.protocol.control_pace import LONGEST_AWAITED_LOOKS, default_interval_s
from diloco.protocol.records import Identity
from diloco.store.base import StoreError
from diloco.store.daemon import call_in_daemon
from diloco.training.local_progress import LocalProgress

log = logging.getLogger(__name__)

LISTING_S = 1.0
"""How long a step boundary waits for a listing; a later one uses the result of a slower listing."""
LEASES_READ = 16
"""Leases of contributors that a listing in the first round reads, from its second on."""


class PartialRounds:
    """Decides at each step boundary whether the replica ends its round there. Its upload, which
    takes as long as the last one, must fit into the window too."""

    def __init__(
        self,
        progress: LocalProgress,
        round_observer: RoundObserver,
        *,
        lease: Lease,
        observer: Observer,
        clock: Clock,
    ) -> None:
        settings = progress.settings
        self._progress = progress
        self._upload_s = 0.0
        self._is_on = settings.partial_rounds == "on"
        self._quorum = settings.min_quorum
        self._window_s = settings.grace_floor_s if settings.grace_gamma > 0 else settings.grace_s
        self._timeout_s = settings.heartbeat_timeout_s
        self._every_s = max(self._timeout_s / 5, self._window_s / 8)
        self._unaware_s = LONGEST_AWAITED_LOOKS * default_interval_s(self._timeout_s)
        """For how long others can have waited before the lease shows it."""
        self._round_observer = round_observer
        self._lease = lease
        self._observer = observer
        self._has_read_leases = self._runs_contributor = False
        self._clock = clock
        self._first_round = self._round = 0
        self._before: frozenset[Identity] = frozenset()
        self._before_s = self._looked_s = 0.0
        """When the last two listings began."""
        self._listing: Future[frozenset[Identity]] | None = None
        self._closes_s: float | None = None

    def join(self, round: int, before: Collection[Identity]) -> None:
        """Note that this process joins in ``round``; ``before`` are the other contributors of the
        round before it."""
        self._first_round, self._before = round, frozenset(before)

    def contributed(self, timings: Timings) -> None:
        """Record the duration of a contribution."""
        self._upload_s = timings.seconds.get("encode", 0.0) + timings.seconds.get("upload", 0.0)

    def must_end(self, round: int, *, steps: int) -> bool:
        """Return whether the replica would miss the grace window of ``round`` with all ``steps``,
        or all others wait for it in its first round.

        Not in a round to which an earlier process has contributed.
        """
        counter = self._progress.counter
        made = counter.steps_in_round
        if not self._is_on or made >= steps or self._progress.earlier_contributor(round):
            return False
        now_s = self._clock.monotonic()
        if round != self._round:
            self._round, self._looked_s, self._closes_s = round, now_s, None
            self._listing = None
        is_first = round == self._first_round
        is_new = is_first and counter.compute_in_round_s < self._timeout_s
        if not (is_new or self._lease.is_awaited):
            self._looked_s = now_s - self._unaware_s
        elif is_first or self._closes_s is None:
            self._look(now_s, self._every_s / 3 if is_first else self._every_s)
        if self._closes_s is None:
            return False
        left_s = (steps - made) * counter.compute_in_round_s / made
        return now_s + left_s + self._upload_s > self._closes_s

    def _look(self, now_s: float, every_s: float) -> None:
        """Look for a quorum. The window counts from the look before, or from when no other waited,
        because the quorum can have been there since."""
        if self._listing is None:
            if now_s < self._looked_s + every_s:
                return
            self._before_s, self._looked_s = self._looked_s, now_s
            round = self._round
            self._listing = call_in_daemon(lambda: self._contributors(round), name="partial round")
            wait([self._listing], timeout=LISTING_S)
        if not self._listing.done():
            return
        listing, self._listing = self._listing, None
        try:
            found = listing.result()
        except StoreError as error:
            log.warning("cannot look for the quorum of round %d: %s", self._round, error)
            return
        if self._round == self._first_round and self._all_have_contributed(found):
            self._closes_s = now_s
        elif self._closes_s is None and len({one.replica for one in found}) >= self._quorum:
            self._closes_s = self._before_s + self._window_s

    def _contributors(self, round: int) -> frozenset[Identity]:
        """List the contributors; in the first round none until one of them runs."""
        found = self._round_observer.contributors(round)
        if not found or round != self._first_round or self._runs_contributor:
            return found
        some = sorted({one.replica for one in found})[:LEASES_READ]
        self._observer.look(only=some if self._has_read_leases else None)
        self._has_read_leases = True
        self._runs_contributor = any(
            self._observer.has_changed(one.replica)
            and self._observer.newest_process(one.replica) == one
            for one in found
        )
        return found if self._runs_contributor else frozenset()

    def _all_have_contributed(self, found: Collection[Identity]) -> bool:
        """Return whether all replicas of the round before have contributed, one of them without a
        new process."""
        missing = {one.replica for one in self._before} - {one.replica for one in found}
        return not missing and not self._before.isdisjoint(found)
