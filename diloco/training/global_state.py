"""The global weights and the outer optimizer of a replica.

The parameters of the model are the *local* weights; during a round they drift from the global ones.
When a round of a fragment is committed, a part of the drift is added to the new global weights: if
the round did not include this replica, what it keeps as late work
(:mod:`diloco.training.late_share`); for a contributor alpha times the drift since the contributed
snapshot. So no step counts twice. Notation as in Streaming DiLoCo (arXiv:2501.18512).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from diloco.exchange.reduce import Merged
from diloco.exchange.round_observer import Base
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol.blocks import Span
from diloco.protocol.records import Commit
from diloco.protocol.round_view import Totals
from diloco.training.checkpoint import Restored


class GlobalState:
    """The global state, a function of a checkpoint and the commits since (I3).

    Only :meth:`load` and :meth:`apply` change it. ``weights`` are the elements that this process
    holds, on the CPU in the group's ``master_dtype``, ``round`` the next round to apply, ``bases``
    the base of each fragment. ``before_change`` is called before the weights or the state of
    ``outer`` change.
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
        self._local: Tensor | None = None
        self.before_change: Callable[[], None] = lambda: None

    @property
    def fragments(self) -> int:
        return self.layout.table.fragments

    @property
    def whole(self) -> Base:
        """The newest applied round, with the digest of all weights."""
        return Base(round=max(base.round for base in self.bases), digest=self.model_digest())

    def model_digest(self) -> str:
        """Return the digest of all weights."""
        assert self.weights is not None
        return self.layout.model_digest(self.weights)

    def snapshot(self) -> tuple[Tensor, OuterOptimizer]:
        """Return the held weights, and the outer optimizer with their state.

        Both keep their values when :meth:`load` replaces the state; :meth:`apply` changes them.
        """
        assert self.weights is not None
        return self.weights, self.outer.with_vectors(dict(self.outer.vectors))

    def first_snapshot(self) -> tuple[Tensor, OuterOptimizer]:
        """Return the held local weights as global ones, and an outer optimizer without a step."""
        weights = self.layout.read().to(self.outer.weights_dtype)
        return weights, self.outer.with_vectors(self.outer.zeros(weights.numel()))

    def load(self, restored: Restored, commit: Commit | None) -> None:
        """Load a checkpoint and its commit into the state and the model; discards local progress.

        The caller has already loaded the state of the outer optimizer.
        """
        self.weights = restored.weights
        self.bases = [
            Base(round=round, digest=self.layout.digest(self.view(fragment)))
            for fragment, round in enumerate(restored.base_rounds)
        ]
        self.layout.write(self.weights)
        self.totals = restored.totals
        self.last_commit = commit
        self.round = restored.round + 1

    def view(self, fragment: int) -> Tensor:
        """Return a view of the held global weights of a fragment, (n,)."""
        assert self.weights is not None
        span = self.layout.held_span(fragment)
        return self.weights[span.start : span.stop]

    def drift(self, fragment: int) -> Tensor:
        """Return ``local - base`` of a fragment as a new tensor, (n,) fp32 on the CPU."""
        return self.layout.progress(self.view(fragment), fragment)

    def put_drift(self, into: Tensor, fragment: int, *, add: bool = False) -> Tensor:
        """Write :meth:`drift` into ``into`` (n,), or add it; return ``into``."""
        self.layout.put_progress(into, self.view(fragment), fragment, add=add)
        return into

    def apply(self, commit: Commit, merged: Merged | None, *, kept: Tensor | None) -> None:
        """Apply the next commit: the outer step with the merged pseudo-gradient.

        A void commit (``merged`` None) does not change the weights. The local weights of the
        fragment become the new global ones plus ``kept`` (n,), whose memory is reused; averaged
        buffers become the global ones.
        """
        assert commit.round == self.round, "commits are applied in order"
        assert self.weights is not None
        self.update_norm = 0.0
        if merged is not None:
            self.before_change()
            span: Span = self.layout.held_span(commit.fragment)
            norm = self.outer.step(
                self.weights,
                merged.vector,
                span,
                round=commit.committed_total,
                present=merged.present,
                position=self.layout.held_position(commit.fragment),
            )
            self.update_norm = self.layout.norm(norm)
            weights = self.view(commit.fragment)
            base = Base(round=commit.round, digest=self.layout.digest(weights))
            self.bases[commit.fragment] = base
            if kept is not None:
                self._drop_buffers(kept, span)
            local = weights if kept is None else kept.add_(weights)
            self.layout.write(local, commit.fragment)
        self.totals = Totals(committed=commit.committed_total, tokens=commit.tokens_total)
        self.last_commit = commit
        self.round = commit.round + 1

    def _drop_buffers(self, kept: Tensor, span: Span) -> None:
        """Set the progress of averaged buffers in a fragment to zero, in place. They are estimates:
        a sum of several has another meaning, and that of a variance can be negative."""
        for inner in self._buffers(span):
            kept[inner.start : inner.stop].zero_()

    def _buffers(self, span: Span) -> Iterator[Span]:
        """Yield the averaged buffers of a fragment, counted from its first held element."""
        for inner in self.layout.held_averaged:
            if span.start <= inner.start < span.stop:
                yield Span(inner.start - span.start, inner.stop - span.start)

    def parameter_spans(self, fragment: int) -> Iterator[Span]:
        """Yield the held elements of a fragment that are not averaged buffers, counted from its
        first one."""
        span, start = self.layout.held_span(fragment), 0
        for inner in self._buffers(span):
            yield Span(start, inner.start)
            start = inner.stop
        yield Span(start, span.numel)

    def discard_local(self) -> None:
        """Replace the local weights by the global ones."""
        assert self.weights is not None
        self.layout.write(self.weights)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The model has the global weights in the block, and afterwards the local ones again."""
        self.show()
        try:
            yield
        finally:
            self.hide()

    def show(self) -> None:
        """Replace the local weights by the global ones until :meth:`hide`."""
        assert self.weights is not None
        self._local = self.layout.read()
        self.layout.write(self.weights)

    def hide(self) -> None:
        """Restore the local weights."""
        assert self._local is not None
        self.layout.write(self._local)
        self._local = None


def is_finite(vector: Tensor) -> bool:
    """Return whether the sum of a vector is finite, which fails if any element is not."""
    return bool(torch.isfinite(vector.sum()))
