"""Bringing the global state up to date: the newest checkpoint, then the commits since."""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.errors import ReplicaError
from diloco.exchange.inflight_rounds import InflightRound, InflightRounds
from diloco.exchange.reduce import CannotReduce
from diloco.exchange.round_exchange import DAMAGE_PATIENCE_S, Exchange
from diloco.exchange.round_observer import READ_AHEAD, RoundObserver
from diloco.membership.observer import Observer
from diloco.protocol.reading import Damaged
from diloco.protocol.records import Commit
from diloco.training.context import ReplicaContext
from diloco.training.initial_state import (
    TRY_AGAIN_S,
    checkpoint_wait_s,
    first_checkpoint_wait_s,
    first_state,
    newest_state,
    write_first,
)
from diloco.training.late_share import NOTHING
from diloco.training.local_progress import LocalProgress
from diloco.training.rescue import Rescue

log = logging.getLogger(__name__)

DAMAGE_POLL_S = 1.0
"""Pause between two reads of a damaged record."""


class CatchUp:
    """Loads checkpoints and applies commits, up to the next open round. ``finish_checkpoint`` waits
    for the checkpoint that this replica writes, whose tensors must not change."""

    def __init__(
        self,
        context: ReplicaContext,
        progress: LocalProgress,
        inflight: InflightRounds,
        *,
        observer: Observer,
        round_observer: RoundObserver,
        exchange: Exchange,
        rescue: Rescue,
        finish_checkpoint: Callable[[], None],
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._lease = context.lease
        self._check = context.check
        self._progress = progress
        self._state = progress.state
        self._inflight = inflight
        self._observer = observer
        self._round_observer = round_observer
        self._exchange = exchange
        self._rescue = rescue
        self._finish_checkpoint = finish_checkpoint
        self._wait_s = checkpoint_wait_s(context.settings)
        self._wrote_first = False
        self._repair_first_s = 0.0

    def load_first(self) -> None:
        """Load the newest checkpoint; write checkpoint 0 if there is none."""
        context, state = self._context, self._state
        self._wrote_first = first_state(
            context.store,
            context.identity,
            state,
            self._clock,
            self._check,
            committer=context.committer,
            wait_s=first_checkpoint_wait_s(context.settings),
            on_missing=lambda message: self._lease.update(message=message),
            storage=context.storage,
        )
        self.reload(at_least=0)
        self._wrote_first = False

    def reload(self, *, at_least: int, why: str = "") -> None:
        """Load the newest checkpoint of round ``at_least`` or later; discard local progress.

        While there is no such checkpoint, the lease shows the round, so that other replicas write
        one.
        """
        state = self._state
        self._finish_checkpoint()

        def on_missing(message: str) -> None:
            self._lease.update(state="syncing", blocked=at_least, message=message)
            self._observer.look()
            self._rescue.look()
            self._repair_first()

        try:
            restored = newest_state(
                self._context.store,
                state.layout,
                state.outer,
                at_least,
                self._clock,
                self._check,
                why=why,
                wait_s=self._wait_s,
                on_missing=on_missing,
                storage=self._context.storage,
            )
            commit = self._commit_of_checkpoint(restored.round)
        finally:
            self._lease.update(blocked=None, message="")
        state.load(restored, commit)
        self._progress.mark_discarded()
        self._inflight.drop_before(state.round)

    def apply_commits(self, missed: InflightRound | None) -> None:
        """Apply all commits up to the next open round. ``missed`` is this replica's contribution to
        a round that was committed without it, or that it cannot read."""
        state, applied = self._state, 0
        while not self._inflight.has(state.round):
            if applied % READ_AHEAD == 2:  # a replica that missed one round reads no more
                self._round_observer.read_ahead(state.round)
            try:
                commit = self._commit_to_apply(state.round)
                if commit is None:
                    break
                merged = self._exchange.replay(commit)
            except CannotReduce as error:
                log.warning("round %d cannot be replayed: %s", state.round, error)
                self.reload(
                    at_least=state.round, why=f"round {state.round} cannot be read: {error}"
                )
                continue
            own = missed if missed and missed.round == commit.round else None
            in_quarantine = self._progress.in_quarantine(commit.round)
            plan = self._round_observer.known_plan(commit.round)
            keep = NOTHING if commit.void else self._progress.late_share.of(plan)
            self._finish_checkpoint()
            outcome = self._progress.apply(commit, merged, own, keep=keep)
            applied += 1
            if in_quarantine and outcome == "late":
                self._progress.discard()
            if commit.last:
                break

    def _repair_first(self) -> None:
        """Rewrite a damaged checkpoint 0, if this process wrote it and still has the weights."""
        if not self._wrote_first or self._clock.monotonic() < self._repair_first_s:
            return
        log.error("checkpoint 0 cannot be read; rewriting it")
        self._repair_first_s = self._clock.monotonic() + TRY_AGAIN_S
        context = self._context
        write_first(
            context.store,
            context.identity,
            self._state,
            self._clock,
            replace=True,
            storage=context.storage,
        )

    def _commit_of_checkpoint(self, round: int) -> Commit | None:
        """Return the commit of a checkpoint's round. Other replicas rewrite it if it is damaged."""
        if not round:
            return None
        give_up_s = self._clock.monotonic() + self._wait_s
        while True:
            try:
                return self._round_observer.commit_of(round)
            except Damaged as error:
                if self._clock.monotonic() > give_up_s:
                    raise ReplicaError(
                        f"{error}. Restore it from a backup, or fork the run from a checkpoint"
                    ) from None
                self._lease.update(blocked=round, message=str(error))
            self._check()
            self._clock.sleep(DAMAGE_POLL_S)

    def _commit_to_apply(self, round: int) -> Commit | None:
        """Return the commit of a round, if there is one. Raises :class:`CannotReduce` if it is
        damaged permanently."""
        give_up_s = self._clock.monotonic() + DAMAGE_PATIENCE_S
        while True:
            try:
                return self._round_observer.commit_of(round)
            except Damaged as error:
                if self._clock.monotonic() > give_up_s:
                    raise CannotReduce(None, str(error)) from None
            self._check()
            self._clock.sleep(DAMAGE_POLL_S)
