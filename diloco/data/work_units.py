"""Work units: an epoch is seen exactly once while replicas come and go.

Each replica claims units of the epoch through the bucket and trains their samples. **Exactly once**
means: a sample is *seen* when a round is committed that includes the contribution of a process
which recorded the sample for that round before it contributed. No sample is seen twice in an epoch:

- Only the holder of a unit trains its open samples, and each change of the holder, and each
  contribution, is the next link of one chain (:mod:`diloco.data.unit_records`).
- A process is replaced as holder only when it is gone and each of its contributions is decided; if
  it was only suspended, its next contribution fails to add a link, and the process ends without
  contributing.
- Steps whose work is discarded (a crash, a refusal, non-finite weights, ``late_keep`` 0) were not
  seen: their samples are trained again. Work that a round missed and that stays in the local
  weights is recorded again for the next round.

All samples of an epoch are seen once all of its units are, which needs a live replica to take over
the units of those that are gone. Replicas do not wait for that: they go on with the next epoch.

Requests: one create for each round and unit; for each claim one PUT and one create (a few GETs
where several replicas share a stripe); one list in each heartbeat timeout.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.clock import Clock
from diloco.data.sample_stream import Place
from diloco.data.unit_log import ChainState, IsGone, UnitLog
from diloco.data.unit_records import EPOCHS, UnitPlan, merged, without
from diloco.protocol.records import BadRecord, Identity
from diloco.store.base import ListingTooLong, StoreUnavailable

log = logging.getLogger(__name__)


class UnitTakenOver(StoreUnavailable):
    """Another process holds a unit of this one; a new process can continue."""


@dataclass
class _Taken:
    """Samples ``start`` to ``end`` of a unit that this process has trained and that are not seen.
    ``round`` is the undecided round that has them, None if they are in the local weights only."""

    start: int
    end: int
    round: int | None = None
    is_discarded: bool = False


@dataclass
class _Held:
    """A unit that this process holds. ``open`` are samples to train, ``next_seq`` is the number of
    the chain's next link."""

    epoch: int
    unit: int
    next_seq: int
    open: deque[tuple[int, int]]
    taken: list[_Taken] = field(default_factory=list)
    recorded_round: int = 0
    """The round of the newest contribution in the chain."""

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.unit

    @property
    def is_seen(self) -> bool:
        return not self.open and not self.taken


class WorkUnits:
    """The units of one process. ``timeout_s`` is the heartbeat timeout: at most once in it, units
    of processes that are gone are looked for. Not safe for use by several threads."""

    def __init__(
        self, unit_log: UnitLog, plan: UnitPlan, *, is_gone: IsGone, clock: Clock, timeout_s: float
    ) -> None:
        self.plan = plan
        self._log = unit_log
        self._is_gone = is_gone
        self._clock = clock
        self._timeout_s = timeout_s
        self._held: dict[tuple[int, int], _Held] = {}
        self._cursor: Cursor | None = None
        self._look_at_s = float("-inf")
        unit_log.agree(plan)

    # -- training --------------------------------------------------------------------------------

    def take(self, count: int) -> list[Place]:
        """Return the next samples to train; they count as trained when this returns."""
        places: list[Place] = []
        while len(places) < count:
            held = next((h for h in self._held.values() if h.open), None) or self._claim()
            start, end = held.open.popleft()
            stop = min(end, start + count - len(places))
            if stop < end:
                held.open.appendleft((stop, end))
            base = held.unit * self.plan.unit_samples
            places += [Place(held.epoch, base + sample) for sample in range(start, stop)]
            last = held.taken[-1] if held.taken else None
            if last and last.round is None and not last.is_discarded and last.end == start:
                last.end = stop
            else:
                held.taken.append(_Taken(start, stop))
        return places

    def before(self, round: int) -> None:
        """Record the trained samples for ``round``, before this process contributes to it.

        Raises :class:`UnitTakenOver` if another process holds one of the units now. Then nothing is
        contributed: the samples recorded for the round are not seen.
        """
        self._settle()
        self._decide(round, is_included=False)  # a repeated round replaces what was recorded
        for held in list(self._held.values()):
            own = [taken for taken in held.taken if taken.round is None]
            if own or held.recorded_round == round:
                self._record(held, round, own)

    def _record(self, held: _Held, round: int, own: list[_Taken]) -> None:
        ranges = merged((taken.start, taken.end) for taken in own)
        if not self._log.contribute(
            held.epoch, held.unit, held.next_seq, round=round, ranges=ranges
        ):
            raise UnitTakenOver(
                f"work unit {held.unit} of epoch {held.epoch} was taken over, because this process "
                "sent no heartbeats for the heartbeat timeout. Start it again"
            )
        held.next_seq += 1
        held.recorded_round = round
        for taken in own:
            taken.round = round

    def after(self, round: int, outcome: str) -> None:
        """Note the outcome of a round: included, late or void."""
        self._decide(round, is_included=outcome == "included")

    def discarded(self) -> None:
        """Note that the local progress was discarded: its samples are trained again, unless an
        undecided round has them."""
        for held in self._held.values():
            for taken in held.taken:
                taken.is_discarded = True
            self._reopen(held)

    def _settle(self) -> None:
        """Decide rounds whose outcome this process was not notified of."""
        rounds = {taken.round for held in self._held.values() for taken in held.taken}
        for round in sorted(r for r in rounds if r is not None and self._log.is_decided(r)):
            self._decide(round, is_included=self._log.includes(round, self._log.identity))

    def _decide(self, round: int, *, is_included: bool) -> None:
        for held in list(self._held.values()):
            of_round = [taken for taken in held.taken if taken.round == round]
            if is_included:
                held.taken = [taken for taken in held.taken if taken.round != round]
            for taken in of_round:
                taken.round = None
            self._reopen(held)
            if held.is_seen:
                del self._held[held.key]

    def _reopen(self, held: _Held) -> None:
        lost = [taken for taken in held.taken if taken.is_discarded and taken.round is None]
        held.taken = [taken for taken in held.taken if taken not in lost]
        if lost:
            ranges = [*held.open, *((taken.start, taken.end) for taken in lost)]
            held.open = deque(merged(ranges))

    # -- claiming --------------------------------------------------------------------------------

    def _claim(self) -> _Held:
        """Hold another unit: one of a process that is gone, else the next of the epoch."""
        if self._clock.monotonic() >= self._look_at_s:
            self._look_at_s = self._clock.monotonic() + self._timeout_s
            if held := self._take_over():
                return held
        if self._cursor is None:
            self._cursor = Cursor(self.plan, self._log.identity.replica, epoch=self._newest_epoch())
        while True:
            epoch, unit = self._cursor.next(self._log.is_claimed)
            self._log.put_held([*self._held, (epoch, unit)])
            if self._log.claim(epoch, unit, 0):
                return self._hold(epoch, unit, 1, without(self.plan.size_of(unit), ()))
            self._cursor.lost()

    def _newest_epoch(self) -> int:
        """Return the newest epoch of which a unit is held: all earlier ones are claimed."""
        lists = (self._log.held_of(process) for process in self._log.held_by_others())
        epochs = (epoch for held in lists for epoch, _ in held if 0 <= epoch < EPOCHS)
        return max(epochs, default=0)

    def _hold(
        self, epoch: int, unit: int, next_seq: int, ranges: tuple[tuple[int, int], ...]
    ) -> _Held:
        held = _Held(epoch, unit, next_seq, deque(ranges))
        self._held[held.key] = held
        return held

    def _take_over(self) -> _Held | None:
        """Hold a unit of a process that is gone; delete the list of one without open units."""
        for process in self._log.held_by_others():
            if not self._is_gone(process):
                continue
            is_settled = True
            for epoch, unit in self._log.held_of(process):
                if not (0 <= unit < self.plan.units and 0 <= epoch < EPOCHS):
                    log.warning("the list of work units of %s has no unit %d", process, unit)
                    continue
                state = self._state_of(epoch, unit)
                if state is None or state.holder != process:
                    continue
                ranges = without(self.plan.size_of(unit), state.seen)
                if state.is_undecided:
                    is_settled = False
                elif ranges and (held := self._claim_from(process, epoch, unit, state)):
                    return held
            if is_settled:
                self._log.delete_held(process)
        return None

    def _claim_from(
        self, process: Identity, epoch: int, unit: int, state: ChainState
    ) -> _Held | None:
        self._log.put_held([*self._held, (epoch, unit)])
        if not self._log.claim(epoch, unit, state.next_seq):
            return None
        ranges = without(self.plan.size_of(unit), state.seen)
        log.info("work unit %d of epoch %d is taken over from %s", unit, epoch, process)
        return self._hold(epoch, unit, state.next_seq + 1, ranges)

    def _state_of(self, epoch: int, unit: int) -> ChainState | None:
        try:
            return self._log.state_of(epoch, unit)
        except (BadRecord, ListingTooLong) as error:
            log.error("work unit %d of epoch %d is not taken over: %s", unit, epoch, error)
            return None


class Cursor:
    """The next unit to claim: from the replica's own stripe, then from the others, then of the next
    epoch. Stripe s has the units s, s + S, s + 2 S, ...; replicas claim each stripe in order, so
    that its claimed units are its first ones, and a search by halves finds the first free one."""

    def __init__(self, plan: UnitPlan, replica: int, *, epoch: int) -> None:
        self._plan = plan
        self._own = replica % plan.stripes
        self._epoch = epoch
        self._turn = 0
        self._at = 0
        self._is_known = False

    def next(self, is_claimed: Callable[[int, int], bool]) -> tuple[int, int]:
        """Return an epoch and a unit that is not claimed as far as this process knows."""
        while True:
            stripe = (self._own + self._turn) % self._plan.stripes
            length = -(-(self._plan.units - stripe) // self._plan.stripes)
            if not self._is_known:
                self._at = self._first_free(stripe, length, is_claimed)
                self._is_known = True
            if self._at < length:
                self._at += 1
                return self._epoch, stripe + (self._at - 1) * self._plan.stripes
            self._turn, self._at, self._is_known = self._turn + 1, 0, False
            if self._turn == self._plan.stripes:
                self._epoch, self._turn = self._epoch + 1, 0

    def lost(self) -> None:
        """Note that another process was faster: search again."""
        self._is_known = False

    def _first_free(self, stripe: int, length: int, is_claimed: Callable[[int, int], bool]) -> int:
        low, high = self._at, length
        while low < high:
            middle = (low + high) // 2
            if is_claimed(self._epoch, stripe + middle * self._plan.stripes):
                low = middle + 1
            else:
                high = middle
        return low
