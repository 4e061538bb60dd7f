"""The global side of a replica: global weights, outer optimizer, and what they stand on.

The model's own parameters are the *local* weights. They equal the global ones at the start of a
round, drift during it, and are rebased where a round was committed without them:
``local := global_new + (local - base)``, ``base := global_new``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.checkpoint import Restored
from diloco.exchange import Base
from diloco.layout import Layout
from diloco.outer import OuterOptimizer, digest
from diloco.reduce import Merged
from diloco.rendezvous.records import Commit
from diloco.rendezvous.rounds import Totals


class GlobalState:
    """Moves only by :meth:`load` and :meth:`apply`, so it is a function of checkpoint and log (I3).

    ``weights`` is (numel,) fp32 on the CPU; ``round`` is the next round to be committed.
    """

    def __init__(self, layout: Layout, outer: OuterOptimizer) -> None:
        self.layout = layout
        self.outer = outer
        self.weights: Tensor | None = None
        self.base = Base(round=0, digest="")
        self.totals = Totals()
        self.last_commit: Commit | None = None
        self.round = 1
        self.update_norm = 0.0

    def load(self, restored: Restored, commit: Commit | None) -> None:
        """Take a checkpoint, and the commit it was made after; local progress is dropped.

        The caller has loaded the outer optimizer's state already.
        """
        self._set(restored.weights, restored.round, rebase=False)
        self.totals = restored.totals
        self.last_commit = commit
        self.round = restored.round + 1

    def apply(self, commit: Commit, merged: Merged | None, *, rebase: bool) -> None:
        """Take the outer step of the next commit; a void one (``merged`` None) changes nothing.

        With ``rebase`` the model keeps its progress since the base; without, it takes the global
        weights, because its progress is in them.
        """
        assert commit.round == self.round, "commits are applied in order"
        assert self.weights is not None
        self.update_norm = 0.0
        if merged is not None:
            weights = self.weights.clone()
            self.update_norm = self.outer.step(weights, merged.vector)
            self._set(weights, commit.round, rebase=rebase)
        self.totals = Totals(committed=commit.committed_total, tokens=commit.tokens_total)
        self.last_commit = commit
        self.round = commit.round + 1

    def pseudo_gradient(self) -> Tensor:
        """``base - local``, (numel,) fp32 on the CPU, a new tensor."""
        assert self.weights is not None
        return self.weights.sub(self.layout.read())

    def discard_local(self) -> None:
        """The model takes the global weights."""
        assert self.weights is not None
        self.layout.write(self.weights)

    def _set(self, weights: Tensor, round: int, *, rebase: bool) -> None:
        local = weights
        if rebase:
            assert self.weights is not None
            local = weights.add(self.layout.read().sub(self.weights))
        self.weights = weights
        self.base = Base(round=round, digest=digest(weights))
        self.layout.write(local)


def is_finite(vector: Tensor) -> bool:
    return bool(torch.isfinite(vector).all())
