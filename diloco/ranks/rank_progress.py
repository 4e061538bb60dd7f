"""Global state and local progress of a replica of several ranks.

Every rank has the elements of its slice and executes the same operations on them. The leader's
round loop calls the methods here, which announce themselves to the followers; the followers repeat
the call in :meth:`RankProgress.follow`. Inside a call all ranks use collective operations together.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diloco.clock import Clock
from diloco.exchange.inflight_rounds import InflightRound
from diloco.exchange.reduce import Merged
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings
from diloco.ranks.collective_ops import Ranks
from diloco.ranks.rank_round import RankRound
from diloco.ranks.sliced_layout import SlicedLayout
from diloco.training.checkpoint import Restored, Vectors
from diloco.training.global_state import GlobalState
from diloco.training.late_share import Kept
from diloco.training.local_progress import LocalProgress
from diloco.training.replica_state import (
    LEFT_OUT,
    RESIDUAL,
    EarlyContribution,
    ReplicaState,
)

EMPTY = torch.empty(0)
LEADER_AHEAD_S = 600.0
"""For how long a job of the background waits until this rank's training loop, which the leader can
be ahead of, has opened the round or taken the snapshot."""


class RankState(GlobalState):
    """The slices of the global state that this rank holds."""

    layout: SlicedLayout

    def __init__(self, layout: SlicedLayout, outer: OuterOptimizer, ranks: Ranks) -> None:
        super().__init__(layout, outer)
        self._ranks = ranks
        self.snapshots = 0
        """Number of snapshots so far, equal on all ranks."""
        self._written: tuple[Tensor, OuterOptimizer] | None = None
        self._has_written = threading.Condition()
        self.read: Vectors | None = None
        """The vectors of the checkpoint that :meth:`load` loads."""

    def snapshot(self) -> tuple[Tensor, OuterOptimizer]:
        with self._ranks.announced("snapshot"):
            return self._keep(super().snapshot())

    def first_snapshot(self) -> tuple[Tensor, OuterOptimizer]:
        with self._ranks.announced("first_snapshot"):
            return self._keep(super().first_snapshot())

    def _keep(self, snapshot: tuple[Tensor, OuterOptimizer]) -> tuple[Tensor, OuterOptimizer]:
        with self._has_written:
            self._written = snapshot
            self.snapshots += 1
            self._has_written.notify_all()
        return snapshot

    def written(self, number: int) -> tuple[Tensor, OuterOptimizer]:
        """Return this rank's part of snapshot ``number``, which a checkpoint is written from. The
        leader can be ahead, so that this rank's training loop has not taken it yet."""
        with self._has_written:
            self._has_written.wait_for(lambda: self.snapshots >= number, timeout=LEADER_AHEAD_S)
            assert self.snapshots >= number and self._written is not None
            return self._written

    def model_digest(self) -> str:
        with self._ranks.announced("model_digest"):
            return super().model_digest()

    def load(self, restored: Restored, commit: Commit | None) -> None:
        """Load the vectors of :attr:`read`, which all ranks have read."""
        with self._ranks.announced(
            "load",
            round=restored.round,
            base_rounds=restored.base_rounds,
            committed=restored.totals.committed,
            tokens=restored.totals.tokens,
            commit=commit and commit.to_bytes().decode(),
        ):
            read, self.read, self._written = self.read, None, None
            assert read is not None
            self.outer.vectors.update(read.outer)
            super().load(replace(restored, weights=read.weights), commit)

    def discard_local(self) -> None:
        with self._ranks.announced("discard_local"):
            super().discard_local()

    def show(self) -> None:
        with self._ranks.announced("show"):
            super().show()

    def hide(self) -> None:
        with self._ranks.announced("hide"):
            super().hide()


class RankProgress(LocalProgress):
    """Global state, step counts and residuals of one rank.

    ``opened`` has the contributions that are not applied yet, ``bodies`` this rank's part of their
    payloads if it is kept, ``reductions`` its part of the reductions, with the slices of the merged
    means, all by round. The exchange uses them in its own thread.
    """

    state: RankState

    def __init__(
        self,
        identity: Identity,
        settings: GroupSettings,
        layout: SlicedLayout,
        clock: Clock,
        ranks: Ranks,
    ) -> None:
        super().__init__(identity, settings, layout, clock)
        self.layout = layout
        self.state = RankState(layout, self.state.outer, ranks)
        self.opened: dict[int, InflightRound] = {}
        self.bodies: dict[int, Tensor | None] = {}
        self.reductions: dict[int, RankRound] = {}
        self.held: dict[str, Tensor] = {}
        """This rank's slices of the residuals of a saved state, by their names in it."""
        self._ranks = ranks
        self._is_leader = ranks.channel.is_leader
        self._leader_sent = False
        self._has_opened = threading.Condition()

    def open(self, round: int, fragment: int) -> InflightRound | None:
        with self._ranks.announced("open", round=round, fragment=fragment):
            opened = super().open(round, fragment)
            if opened is not None:
                with self._has_opened:
                    self.opened[round] = opened
                    self._has_opened.notify_all()
            return opened

    def contributed(self, round: int) -> Tensor:
        """Return this rank's slice of the contribution to a round. The leader can be ahead, so that
        this rank's training loop is still opening the round."""
        with self._has_opened:
            self._has_opened.wait_for(lambda: round in self.opened, timeout=LEADER_AHEAD_S)
            return self.opened[round].contributed

    def apply(
        self, commit: Commit, merged: Merged | None, own: InflightRound | None, *, keep: Kept
    ) -> str:
        if self._is_leader and merged is not None:
            self.state.before_change()  # before any rank changes its slice
        with self._ranks.announced(
            "apply",
            commit=commit.to_bytes().decode(),
            present=merged and merged.present,
            own=own is not None,
            sent=own is not None and own.sent is not None,
            keep=dataclasses.astuple(keep),
        ):
            outcome = super().apply(commit, merged, own, keep=keep)
            self._forget(commit.round)
            return outcome

    def _is_sent(self, own: InflightRound) -> bool:
        return own.sent is not None if self._is_leader else self._leader_sent

    def _forget(self, last: int) -> None:
        """Drop the vectors of rounds up to ``last``."""
        for rounds in (self.opened, self.bodies, self.reductions):
            for round in [round for round in list(rounds) if round <= last]:
                del rounds[round]

    def mark_discarded(self) -> None:
        with self._ranks.announced("mark_discarded"):
            super().mark_discarded()
            self._forget(self.state.round - 1)

    def discard(self) -> None:
        with self._ranks.announced("discard"):
            super().discard()

    def discard_non_finite(self, round: int) -> None:
        with self._ranks.announced("discard_non_finite", round=round):
            super().discard_non_finite(round)

    # -- saved state -----------------------------------------------------------------------------

    def saved_residuals(self) -> dict[int, Tensor]:
        with self._ranks.announced("saved_residuals"):
            residuals = super().saved_residuals()
            self.held |= {f"{RESIDUAL}{n}": held for n, held in residuals.items()}
            return residuals

    def left_out(self, opened: InflightRound) -> Tensor | None:
        with self._ranks.announced("left_out", round=opened.round):
            held = super().left_out(opened)
            if held is not None:
                self.held[f"{LEFT_OUT}{opened.round}"] = held
            return held

    def take_residual(self, name: str) -> Tensor:
        """Return this rank's slice of a residual to save: of :meth:`saved_residuals`, of
        :meth:`left_out`, or of an early contribution that is not decided yet."""
        if name in self.held:
            return self.held.pop(name)
        residual = self.early[int(name.removeprefix(LEFT_OUT))].residual
        assert residual is not None
        return residual

    def restore(self, saved: ReplicaState, since: Iterable[Commit]) -> None:
        """Like :meth:`LocalProgress.restore`, on all ranks, with the slices that each has read."""
        since = list(since)
        with self._ranks.announced(
            "restore",
            residuals=[*saved.residuals],
            early={
                round: [early.incarnation, early.residual is not None]
                for round, early in saved.early.items()
            },
            since=[commit.to_bytes().decode() for commit in since],
        ):
            self.held = {}
            super().restore(saved, since)

    # -- followers -------------------------------------------------------------------------------

    def follow(self, call: str, arguments: dict[str, Any]) -> None:
        """Repeat a call of the leader."""
        state = self.state
        match call:
            case "snapshot" | "first_snapshot" | "model_digest" | "discard_local" | "show" | "hide":
                getattr(state, call)()
            case "mark_discarded" | "discard" | "saved_residuals":
                getattr(self, call)()
            case "open" | "discard_non_finite":
                getattr(self, call)(**arguments)
            case "left_out":
                self.left_out(self.opened[arguments["round"]])
            case "load":
                self._follow_load(**arguments)
            case "apply":
                self._follow_apply(**arguments)
            case "restore":
                self._follow_restore(**arguments)
            case _:
                raise AssertionError(call)

    def _follow_load(
        self,
        *,
        round: int,
        base_rounds: list[int],
        committed: int,
        tokens: int,
        commit: str | None,
    ) -> None:
        restored = Restored(
            round=round,
            weights=EMPTY,
            base_rounds=tuple(base_rounds),
            totals=Totals(committed=committed, tokens=tokens),
        )
        self.state.load(restored, _commit(commit) if commit else None)

    def _follow_apply(
        self, *, commit: str, present: float | None, own: bool, sent: bool, keep: tuple[float, bool]
    ) -> None:
        received = _commit(commit)
        round, merged = received.round, None
        if present is not None:
            part = self.reductions.get(round)
            merged = Merged(vector=part.merged if part else EMPTY, present=present)
        self._leader_sent = sent
        self.apply(received, merged, self.opened[round] if own else None, keep=Kept(*keep))

    def _follow_restore(
        self, *, residuals: list[int], early: dict[str, tuple[str, bool]], since: list[str]
    ) -> None:
        held = self.held
        saved = ReplicaState(
            round=0,
            tokens=0,
            trees={},
            residuals={n: held[f"{RESIDUAL}{n}"] for n in residuals},
            early={
                int(n): EarlyContribution(
                    incarnation=name, residual=held[f"{LEFT_OUT}{n}"] if has_residual else None
                )
                for n, (name, has_residual) in early.items()
            },
        )
        self.restore(saved, map(_commit, since))


def _commit(text: str) -> Commit:
    return Commit.from_bytes(text.encode())
