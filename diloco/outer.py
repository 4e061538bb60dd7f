"""The outer side of DiLoCo: global weights, pseudo-gradients and the outer step.

Sign: the pseudo-gradient is ``base - local`` (arXiv:2311.08105, algorithm 1, line 12), so the outer
optimizer *descends* along it.

Everything here runs on the CPU in fp32 by separate multiplies and adds in a fixed order, so that
every replica computes the same bits (invariant I3): no ``torch.optim``, ``alpha=``, ``lerp`` or
``addcmul``, whose fused multiply-adds differ between machines, and no ``sum``, whose order changes
with the number of threads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor


class OuterOptimizer:
    """SGD with Nesterov momentum on flat fp32 CPU vectors.

    With g the averaged pseudo-gradient: ``m = mu*m + g``; ``w = w - lr*(mu*m + g)``. Equal to
    ``torch.optim.SGD(nesterov=True)`` in exact arithmetic.
    """

    def __init__(self, *, lr: float, momentum: float, numel: int) -> None:
        self.lr = lr
        self.momentum = momentum
        self.buffer = torch.zeros(numel, dtype=torch.float32)

    @torch.no_grad()
    def step(self, weights: Tensor, gradient: Tensor) -> float:
        """Update ``weights`` (numel,) in place; returns the L2 norm of the change."""
        self.buffer.mul_(self.momentum)
        self.buffer.add_(gradient)
        update = self.buffer.mul(self.momentum)
        update.add_(gradient)
        update.mul_(self.lr)
        weights.sub_(update)
        return l2_norm(update)


@torch.no_grad()
def merge(vectors: Iterable[tuple[float, Tensor]], *, numel: int) -> Tensor:
    """Weighted sum of fp32 vectors in the order given: ``0 + w1*x1 + w2*x2 + ...``.

    Weights are expected to sum to one. One vector is held at a time beside the result.
    """
    total = torch.zeros(numel, dtype=torch.float32)
    for weight, vector in vectors:
        total.add_(vector.mul(weight))
    return total


@torch.no_grad()
def l2_norm(vector: Tensor, *, chunk: int = 2**20) -> float:
    """L2 norm by fp64 sums over a fixed binary tree: the same bits on any CPU, any thread count."""
    total = 0.0
    for start in range(0, vector.numel(), chunk):
        squares = vector[start : start + chunk].double()
        squares = squares.mul(squares)
        while squares.numel() > 1:
            if squares.numel() % 2:
                squares = torch.cat([squares, squares.new_zeros(1)])
            squares = squares[0::2].add(squares[1::2])
        total += float(squares[0])
    return math.sqrt(total) if math.isfinite(total) else float("nan")


def digest(vector: Tensor) -> str:
    """sha256 of a flat fp32 CPU vector's bytes."""
    return hashlib.sha256(vector.contiguous().numpy().data.cast("B")).hexdigest()
