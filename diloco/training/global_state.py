"""The global side of a replica: global weights, outer optimizer, and what they stand on.

The model's own parameters are the *local* weights. They drift away from the global ones during a
round. When a fragment's round is committed, what remains of the drift is laid on the new global
weights: all of it if the round was missed (``local := global_new + (local - base)``), nothing of it
under the policy *overwrite*, and for a named contributor only what came after the snapshot it
contributed, times alpha. So no step ever counts twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.exchange.reduce import Merged
from diloco.exchange.round_observer import Base
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer, digest
from diloco.protocol.blocks import Span
from diloco.protocol.records import Commit
from diloco.protocol.round_view import Totals
from diloco.training.checkpoint import Restored


class GlobalState:
    """Moves only by :meth:`load` and :meth:`apply`, so it is a function of checkpoint and log (I3).

    ``weights`` is (numel,) fp32 on the CPU; ``round`` is the next round to be applied; ``bases``
    has one entry per fragment.
    """

    def __init__(self, layout: Layout, outer: OuterOptimizer) -> None:
        self.layout = layout
        self.outer = outer
        self.weights: Tensor | None = None
        self.bases: list[Base] = []
        self.totals = Totals()
        self.last_commit: Commit | None = None
        self.round = 1
        self.update_norm = 0.0

    @property
    def fragments(self) -> int:
        return self.layout.table.fragments

    @property
    def whole(self) -> Base:
        """The newest committed round, and the digest of all weights."""
        assert self.weights is not None
        return Base(round=max(base.round for base in self.bases), digest=digest(self.weights))

    def load(self, restored: Restored, commit: Commit | None) -> None:
        """Take a checkpoint, and the commit it was made after; local progress is dropped.

        The caller has loaded the outer optimizer's state already.
        """
        self.weights = restored.weights
        self.bases = [
            Base(round=round, digest=digest(self.view(fragment)))
            for fragment, round in enumerate(restored.base_rounds)
        ]
        self.layout.write(restored.weights)
        self.totals = restored.totals
        self.last_commit = commit
        self.round = restored.round + 1

    def view(self, fragment: int) -> Tensor:
        """The global weights of a fragment, (n,), shared."""
        assert self.weights is not None
        span = self.layout.span(fragment)
        return self.weights[span.start : span.stop]

    def drift(self, fragment: int) -> Tensor:
        """``local - base`` of a fragment, (n,) fp32 on the CPU, a new tensor."""
        return self.layout.progress(self.view(fragment), fragment)

    def put_drift(self, into: Tensor, fragment: int, *, add: bool = False) -> Tensor:
        """The same written ``into`` (n,), or added to it."""
        self.layout.put_progress(into, self.view(fragment), fragment, add=add)
        return into

    def apply(self, commit: Commit, merged: Merged | None, *, kept: Tensor | None) -> None:
        """Take the outer step of the next commit; a void one (``merged`` None) changes nothing.

        ``kept`` (n,) is laid on the new global weights of the fragment; it is used up.
        """
        assert commit.round == self.round, "commits are applied in order"
        assert self.weights is not None
        self.update_norm = 0.0
        if merged is not None:
            span: Span = self.layout.span(commit.fragment)
            self.update_norm = self.outer.step(self.weights, merged.vector, span)
            weights = self.view(commit.fragment)
            self.bases[commit.fragment] = Base(round=commit.round, digest=digest(weights))
            local = weights if kept is None else kept.add_(weights)
            self.layout.write(local, commit.fragment)
        self.totals = Totals(committed=commit.committed_total, tokens=commit.tokens_total)
        self.last_commit = commit
        self.round = commit.round + 1

    def discard_local(self) -> None:
        """The model takes the global weights."""
        assert self.weights is not None
        self.layout.write(self.weights)


def is_finite(vector: Tensor) -> bool:
    return bool(torch.isfinite(vector.sum()))
