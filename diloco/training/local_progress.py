"""The ledger of one replica: global state, its own work, and what becomes of it with each commit.

Every inner step is in exactly one of four places: in the local weights on top of its fragment's
base, in a contribution that is on its way, in the global weights, or thrown away on purpose.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import Tensor

from diloco.clock import Clock
from diloco.errors import ReplicaError
from diloco.exchange.error_feedback import Residuals
from diloco.exchange.inflight_rounds import OpenRound
from diloco.exchange.reduce import Merged
from diloco.exchange.round_exchange import Timings
from diloco.exchange.step_accounting import Work
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol.records import Commit, Identity
from diloco.protocol.settings import GroupSettings
from diloco.training.global_state import GlobalState, is_finite
from diloco.training.replica_state import HandedIn, ReplicaState

log = logging.getLogger(__name__)

MISSES = 3
"""Rounds missed in a row that are worth an alert."""
DISCARDS = 10
"""Times in a row that local weights may become non-finite before a replica gives up."""


class Ledger:
    """``joined`` says that the log has been caught up with: from then on a miss is a miss.
    ``rounds_here`` counts the rounds followed since."""

    def __init__(
        self, identity: Identity, settings: GroupSettings, layout: Layout, clock: Clock
    ) -> None:
        self.identity = identity
        self.settings = settings
        outer = OuterOptimizer(
            lr=settings.outer_lr, momentum=settings.outer_momentum, numel=layout.numel
        )
        self.state = GlobalState(layout, outer)
        self.work = Work(clock, fragments=settings.num_fragments)
        self.residuals = Residuals(settings, fragments=settings.num_fragments)
        self.joined = False
        self.handed_in: dict[int, HandedIn] = {}
        """By an earlier process, to rounds that are not decided yet."""
        self._unreadable: set[int] = set()
        self.rounds_here = 0
        self._clock = clock
        self._misses = 0
        self._discards = 0

    def open(self, round: int, fragment: int) -> OpenRound | None:
        """What is to be contributed to a round whose steps are over; None if the local weights are
        not finite, and nothing of them may reach the group."""
        gradient = self.state.drift(fragment).neg_()
        if not is_finite(gradient):
            return None
        return OpenRound(
            round=round,
            fragment=fragment,
            base=self.state.bases[fragment],
            mark=self.work.now,
            due_steps=self.work.now.steps + self.settings.overlap_steps,
            work=self.work.contribute(fragment),
            gradient=gradient,
            contributed=self.residuals.added_to(gradient, fragment),
            timings=Timings(self._clock),
            started_wall_s=self.work.round_started_wall_s,
            compute_s=self.work.compute_in_round_s,
        )

    def apply(
        self, commit: Commit, merged: Merged | None, ours: OpenRound | None, *, policy: str
    ) -> str:
        """Take the outer step of a commit, and keep of the local drift what is to be kept."""
        fragment = commit.fragment
        self.rounds_here += 1
        if commit.void:
            log.error("round %d is void: %s", commit.round, commit.void)
            self.state.apply(commit, None, kept=None)
            self.handed_in.pop(commit.round, None)
            if ours and ours.lives:
                self.work.take_back(ours.work)
            return "void"
        assert merged is not None
        if ours and ours.sent and self.identity in commit.contributors:
            self._misses = self._discards = 0
            self.handed_in.pop(commit.round, None)
            kept = None
            if self.settings.overlap_steps > 0 and self.work.now.steps > ours.mark.steps:
                kept = self._since_snapshot(ours).mul_(self.settings.mixing_alpha)
            self.state.apply(commit, merged, kept=kept)
            if ours.lives:
                self.work.move_base(fragment, ours.mark)
            self.residuals.taken(ours.contributed, fragment)
            return "included"
        self._miss(commit)
        if commit.round in self.handed_in:
            policy = "rebase"  # it is not late: its place is taken by what was handed in
        if policy == "rebase" and self.work.steps_since_base(fragment) > 0:
            kept = (
                self.state.put_drift(ours.gradient, fragment)
                if ours
                else self.state.drift(fragment)
            )
            self.state.apply(commit, merged, kept=kept)
            if ours and ours.lives:
                self.work.take_back(ours.work)
        else:
            self.state.apply(commit, merged, kept=None)
            self.work.move_base(fragment, self.work.now)
            if ours and ours.lives:
                self.residuals.overwritten(ours.contributed, fragment)
        self._heed_earlier(commit)
        return "late"

    def _since_snapshot(self, ours: OpenRound) -> Tensor:
        """What came after the snapshot that was contributed, (n,): (local - base) - (snapshot -
        base). In the gradient's place, unless that is to become the residual: the fragment that is
        merged lies beside it, and a third would be one too many."""
        into = ours.gradient
        if self.residuals.active and ours.contributed is ours.gradient:
            into = into.clone()
        return self.state.put_drift(into, ours.fragment, add=ours.lives)

    def restore(self, saved: ReplicaState, since: Iterable[Commit]) -> None:
        """Take up an earlier process' residuals and what it handed in. ``since`` are the commits
        after its state, up to this process' own."""
        self.residuals.restore(saved.residuals)
        self.handed_in = dict(saved.handed_in)
        for commit in since:
            self._heed_earlier(commit)

    def earlier_contribution(self, round: int) -> Identity | None:
        """The process of this replica that contributed to an undecided round before this one did.
        None if there is none, or if its record cannot be read: then this process contributes."""
        handed_in = self.handed_in.get(round)
        if handed_in is None or round in self._unreadable:
            return None
        return Identity(replica=self.identity.replica, incarnation=handed_in.incarnation)

    def replace_earlier(self, round: int) -> None:
        """The record of the earlier process' contribution cannot be read, so this process is to
        contribute in its place. Only one of the two is ever in the plan, and what is known of the
        earlier one is kept for the case that another replica had read its record before."""
        self._unreadable.add(round)

    def _heed_earlier(self, commit: Commit) -> None:
        """A round may have taken what an earlier process of this replica had contributed: then its
        residual is as that one foresaw, or part of it is in the global weights already."""
        handed_in = self.handed_in.pop(commit.round, None)
        theirs = self._own_number(commit)
        if theirs and not commit.void:
            foreseen = handed_in is not None and handed_in.incarnation == theirs.incarnation
            left_out = handed_in.residual if handed_in and foreseen else None
            self.residuals.of[commit.fragment] = left_out

    def _own_number(self, commit: Commit) -> Identity | None:
        """The contributor of this replica number, whichever process of it."""
        replica = self.identity.replica
        return next((c for c in commit.contributors if c.replica == replica), None)

    def in_quarantine(self, round: int) -> bool:
        """Whether a contribution of this replica to ``round`` is one of its first."""
        rounds = min(self.settings.quarantine_rounds, round - 1)
        return self.joined and self.rounds_here < rounds and round not in self.handed_in

    def overwrite(self) -> None:
        """Take the global weights in place of all local ones, of every fragment: this replica is in
        quarantine, and its next contribution must not hold what it did there."""
        self.state.discard_local()
        self.throw_away()

    def throw_away(self) -> None:
        """The local weights have just been replaced by the global ones."""
        self.work.throw_away()
        self.residuals.drop()

    def discard(self, round: int) -> None:
        """Take the global weights in place of local ones that are not finite.

        Raises :class:`~diloco.errors.ReplicaError` when that has become a habit.
        """
        log.error(
            "round %d: expected finite weights, found NaN or infinity; local work is discarded "
            "and the inner optimizer is reset",
            round,
        )
        self._discards += 1
        if self._discards >= DISCARDS:
            raise ReplicaError(
                f"expected finite weights after {self.settings.sync_every} inner steps, found NaN "
                f"or infinity {DISCARDS} times in a row, each time from the global weights"
            )
        self.state.discard_local()
        self.throw_away()

    def _miss(self, commit: Commit) -> None:
        if not self.joined or self._own_number(commit):
            return  # it is replaying the log, or an earlier process has contributed
        self._misses += 1
        if self._misses == MISSES:
            log.error(
                "%d rounds in a row, up to %d, were committed without this replica",
                MISSES, commit.round,
            )  # fmt: skip
