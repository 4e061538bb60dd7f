"""The local progress of a replica: its inner steps, and what each commit does with them.

Every inner step is in exactly one of four places: in the local weights relative to the base of its
fragment, in a contribution that is being exchanged, in the global weights, or discarded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from diloco.clock import Clock
from diloco.errors import ReplicaError
from diloco.exchange.error_feedback import ErrorFeedback
from diloco.exchange.inflight_rounds import InflightRound
from diloco.exchange.reduce import Merged
from diloco.exchange.round_exchange import Timings
from diloco.exchange.step_accounting import StepCounter
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.model.projection import add_scaled, coefficient
from diloco.protocol.records import Commit, Identity
from diloco.protocol.settings import GroupSettings
from diloco.training.global_state import GlobalState, is_finite
from diloco.training.late_share import ALL, NOTHING, Kept, LateShare
from diloco.training.replica_state import (
    LEFT_OUT,
    EarlyContribution,
    ReplicaState,
    fragment_of,
)

log = logging.getLogger(__name__)

MISSES = 3
"""Number of consecutive missed rounds after which an error is logged."""
DISCARDS = 10
"""Number of consecutive non-finite rounds after which a replica gives up."""


class LocalProgress:
    """Global state, step counts and residuals of one replica.

    ``joined`` is set once the replica has caught up with the log; from then on, missed rounds
    count. ``rounds_here`` counts the rounds since. ``early`` has the contributions of an earlier
    process to rounds that are not decided yet. ``on_discard`` is called when inner steps are
    discarded.
    """

    def __init__(
        self, identity: Identity, settings: GroupSettings, layout: Layout, clock: Clock
    ) -> None:
        self.identity = identity
        self.settings = settings
        outer = OuterOptimizer.of(settings, layout.held_numel, layout.held_averaged)
        self.state = GlobalState(layout, outer)
        self.counter = StepCounter(clock, fragments=settings.num_fragments)
        self.residuals = ErrorFeedback(settings, fragments=settings.num_fragments)
        self.late_share = LateShare(identity.replica, settings)
        self.joined = False
        self.rounds_here = 0
        self.early: dict[int, EarlyContribution] = {}
        self.on_discard: Callable[[], None] = lambda: None
        self._unreadable: set[int] = set()
        self._clock = clock
        self._misses = 0
        self._discards = 0
        self._discarded_steps = -1

    # -- contributing ----------------------------------------------------------------------------

    def open(self, round: int, fragment: int) -> InflightRound | None:
        """Create the contribution to a round whose steps are complete. Returns None if the local
        weights are not finite; such weights must not reach the group."""
        gradient = self.state.drift(fragment).neg_()
        if not self.state.layout.on_all_ranks(is_finite(gradient)):
            return None
        return InflightRound(
            round=round,
            fragment=fragment,
            base=self.state.bases[fragment],
            mark=self.counter.now,
            due_steps=self.counter.now.steps + self.settings.overlap_steps,
            work=self.counter.contribute(fragment),
            gradient=gradient,
            contributed=self.residuals.added_to(gradient, fragment),
            timings=Timings(self._clock),
            began=self.counter.round_began,
            started_wall_s=self.counter.round_started_wall_s,
            compute_s=self.counter.compute_in_round_s,
        )

    # -- applying commits ------------------------------------------------------------------------

    def apply(
        self, commit: Commit, merged: Merged | None, own: InflightRound | None, *, keep: Kept
    ) -> str:
        """Apply a commit to the global and the local weights.

        ``own`` is this replica's contribution to the round, if it has one; ``keep`` is what it
        keeps of its progress if the round did not include it. Returns the outcome: included, late
        or void.
        """
        self.rounds_here += 1
        if commit.void:
            log.error("round %d is void: %s", commit.round, commit.void)
            self.state.apply(commit, None, kept=None)
            self.early.pop(commit.round, None)
            if own and not self.is_discarded(own):
                self.counter.take_back(own.work)
            return "void"
        assert merged is not None
        if own and self._is_sent(own) and self.identity in commit.contributors:
            self._apply_included(commit, merged, own)
            return "included"
        self._miss(commit)
        if commit.round in self.early:
            keep = ALL  # the round includes the early contribution instead
        self._apply_late(commit, merged, own, keep=keep)
        self._resolve_early(commit)
        return "late"

    def _is_sent(self, own: InflightRound) -> bool:
        """Return whether a contribution is durable."""
        return own.sent is not None

    def _apply_included(self, commit: Commit, merged: Merged, own: InflightRound) -> None:
        fragment = commit.fragment
        self._misses = self._discards = 0
        self.early.pop(commit.round, None)
        kept = None
        if self.settings.overlap_steps > 0 and self.counter.now.steps > own.mark.steps:
            kept = self._since_snapshot(own).mul_(self.settings.mixing_alpha)
        self.state.apply(commit, merged, kept=kept)
        if not self.is_discarded(own):
            self.counter.move_base(fragment, own.mark)
        self.residuals.taken(own.contributed, fragment)

    def _apply_late(
        self, commit: Commit, merged: Merged, own: InflightRound | None, *, keep: Kept
    ) -> None:
        fragment = commit.fragment
        if keep != NOTHING and self.counter.steps_since_base(fragment) > 0:
            kept = self._late_progress(fragment, own, keep, mean=merged.vector)
            self.state.apply(commit, merged, kept=kept)
            if own and not self.is_discarded(own):
                self.counter.take_back(own.work)
        else:
            has_steps = self.counter.steps_since_base(fragment) > 0
            self.state.apply(commit, merged, kept=None)
            self.counter.move_base(fragment, self.counter.now)
            if has_steps:
                self.on_discard()

    def _late_progress(
        self, fragment: int, own: InflightRound | None, keep: Kept, *, mean: Tensor
    ) -> Tensor:
        """Return the progress that a replica keeps after a round without it, (n,).

        Of the contributed progress ``d = snapshot - base``: ``share * (d + c * mean)``, where
        ``-c * mean`` is its component along the mean pseudo-gradient (n,) of the round, c >= 0, and
        c = 0 to keep that too. And all steps after the snapshot, which no round has missed. Reuses
        the memory of the gradient.
        """
        if own is None:
            gradient = self.state.drift(fragment).neg_()
            rounds = self.counter.rounds_since_base(fragment)
        elif self.is_discarded(own):
            return self.state.put_drift(own.gradient, fragment)
        else:
            gradient, rounds = own.gradient, own.work.rounds
        c = 0.0 if keep.along_mean else self._along(mean, gradient, fragment)
        share = keep.share if rounds > 1 else 1.0
        dropped = gradient.mul_(1 - share)
        if c > 0:
            add_scaled(dropped, mean, share * c)
        return self.state.put_drift(dropped, fragment, add=True)

    def _along(self, mean: Tensor, gradient: Tensor, fragment: int) -> float:
        spans = self.state.parameter_spans(fragment)
        return coefficient(gradient, mean, spans, total=self.state.layout.total)

    def _since_snapshot(self, own: InflightRound) -> Tensor:
        """Return the local progress since the contributed snapshot, (n,): (local - base) -
        (snapshot - base). Reuses the memory of the gradient, unless that becomes the residual, so
        that at most two vectors of this size exist beside the merged fragment."""
        into = own.gradient
        if self.residuals.active and own.contributed is own.gradient:
            into = into.clone()
        return self.state.put_drift(into, own.fragment, add=not self.is_discarded(own))

    def in_quarantine(self, round: int) -> bool:
        """Return whether a contribution to ``round`` is among the first of this replica."""
        rounds = min(self.settings.quarantine_rounds, round - 1)
        return self.joined and self.rounds_here < rounds and round not in self.early

    def _miss(self, commit: Commit) -> None:
        if not self.joined or self._own_contributor(commit):
            return  # replays the log, or an earlier process has contributed
        self._misses += 1
        if self._misses == MISSES:
            log.error(
                "%d rounds in a row, up to %d, were committed without this replica",
                MISSES,
                commit.round,
            )

    # -- saving ----------------------------------------------------------------------------------

    def saved_residuals(self) -> dict[int, Tensor]:
        """Return the held elements of the residuals by fragment."""
        return {n: e for n, e in enumerate(self.residuals.of) if e is not None}

    def left_out(self, opened: InflightRound) -> Tensor | None:
        """Return the residual (n,) to keep if the round includes a contribution, whose memory is
        reused; None without error feedback."""
        return self.residuals.left_out(opened.contributed)

    # -- contributions of an earlier process -----------------------------------------------------

    def restore(self, saved: ReplicaState, since: Iterable[Commit]) -> None:
        """Restore the residuals and early contributions of an earlier process. ``since`` are the
        commits between its state and that of this process. A residual that does not fit this model
        is dropped."""
        self.residuals.restore(
            {n: held for n, held in saved.residuals.items() if self._fits(held, n)}
        )
        self.early = {
            round: early
            if early.residual is None or self._fits(early.residual, self._fragment_of(round))
            else replace(early, residual=None)
            for round, early in saved.early.items()
        }
        for commit in since:
            self._resolve_early(commit)

    def _fits(self, residual: Tensor, fragment: int) -> bool:
        """Return whether a saved residual can be that of a fragment."""
        layout = self.state.layout
        found = (residual.dtype, tuple(residual.shape))
        if 0 <= fragment < self.state.fragments:
            expected = (torch.float32, (layout.held_span(fragment).numel,))
            if found == expected:
                return True
        log.warning("the saved residual of fragment %d, %s of %s, is not used", fragment, *found)
        return False

    def _fragment_of(self, round: int) -> int:
        return fragment_of(f"{LEFT_OUT}{round}", self.state.fragments)

    def earlier_contributor(self, round: int) -> Identity | None:
        """Return the earlier process of this replica that contributed to an undecided round; None
        if there is none or its record cannot be read, so that this process contributes."""
        early = self.early.get(round)
        if early is None or round in self._unreadable:
            return None
        return Identity(replica=self.identity.replica, incarnation=early.incarnation)

    def open_early(self) -> dict[int, EarlyContribution]:
        """Return the earlier contributions to undecided rounds that can still be read, by round."""
        return {
            round: early
            for round, early in self.early.items()
            if round >= self.state.round and self.earlier_contributor(round) is not None
        }

    def replace_earlier(self, round: int) -> None:
        """Let this process contribute to ``round``, because the earlier process's record cannot be
        read. A plan has only one of the two; the early contribution is kept here in case another
        replica has read its record before."""
        self._unreadable.add(round)

    def _resolve_early(self, commit: Commit) -> None:
        """Update the residual if a round included the contribution of an earlier process: to the
        residual that was saved with it, or to none, because the global weights have part of it."""
        early = self.early.pop(commit.round, None)
        contributor = self._own_contributor(commit)
        if contributor and not commit.void:
            matches = early is not None and early.incarnation == contributor.incarnation
            residual = early.residual if early and matches else None
            self.residuals.of[commit.fragment] = residual

    def _own_contributor(self, commit: Commit) -> Identity | None:
        """Return the process of this replica number that contributed to a commit."""
        replica = self.identity.replica
        return next((c for c in commit.contributors if c.replica == replica), None)

    # -- discarding ------------------------------------------------------------------------------

    def is_discarded(self, opened: InflightRound) -> bool:
        """Return whether the steps of a contribution are no longer in the local weights."""
        return opened.mark.steps <= self._discarded_steps

    def mark_discarded(self) -> None:
        """Record that the local weights have been replaced by the global ones."""
        self._discarded_steps = self.counter.now.steps
        self.counter.throw_away()
        self.residuals.drop()
        self.on_discard()

    def discard(self) -> None:
        """Replace all local weights by the global ones, so that later contributions do not contain
        the local progress."""
        self.state.discard_local()
        self.mark_discarded()

    def discard_non_finite(self, round: int) -> None:
        """Replace non-finite local weights by the global ones.

        Raises :class:`~diloco.errors.ReplicaError` after :data:`DISCARDS` times in a row.
        """
        log.error(
            "round %d: expected finite weights, found NaN or infinity; local progress is discarded "
            "and the inner optimizer is reset",
            round,
        )
        self._discards += 1
        if self._discards >= DISCARDS:
            raise ReplicaError(
                f"expected finite weights after {self.settings.sync_every} inner steps, found NaN "
                f"or infinity {DISCARDS} times in a row, each time from the global weights"
            )
        self.discard()
