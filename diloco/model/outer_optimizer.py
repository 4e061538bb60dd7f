"""The outer side of DiLoCo: averaging pseudo-gradients and the outer step.

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
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from diloco.protocol.blocks import Span

DIGEST_CHUNK = 4 * 2**20
NORM_CHUNK = 2**16
"""Elements whose squares are added in a tree; a power of two that stays in a core's cache."""
NORM_TOP = 256
"""Width of a tree's top, whose levels are too small to be added on their own."""


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
    def step(self, weights: Tensor, gradient: Tensor, where: Span | None = None) -> float:
        """Update the elements ``where`` of ``weights`` (numel,), or all, in place along
        ``gradient`` (n,), which is used up; returns the L2 norm of the change."""
        where = where or Span(0, weights.numel())
        buffer = self.buffer[where.start : where.stop]
        buffer.mul_(self.momentum)
        buffer.add_(gradient)
        squares = 0.0
        for start in range(0, gradient.numel(), NORM_CHUNK * 16):
            piece = slice(start, start + NORM_CHUNK * 16)
            update = buffer[piece].mul(self.momentum)
            update.add_(gradient[piece])
            update.mul_(self.lr)
            weights[where.start : where.stop][piece].sub_(update)
            squares += sum_of_squares(update)
        return _root(squares)


class WeightedSum:
    """``0 + w1*x1 + w2*x2 + ...`` over fp32 CPU vectors in the order given, into (numel,) fp32."""

    def __init__(self, total: Tensor) -> None:
        self.total = total.zero_()
        self._scratch = torch.empty(0)

    @torch.no_grad()
    def add(self, start: int, vector: Tensor, weight: float) -> None:
        """Add ``weight * vector`` to the elements from ``start``; ``vector`` is left unchanged."""
        if self._scratch.numel() < vector.numel():
            self._scratch = torch.empty_like(vector)
        scaled = torch.mul(vector, weight, out=self._scratch[: vector.numel()])
        self.total[start : start + vector.numel()].add_(scaled)


@torch.no_grad()
def rescale(vector: Tensor, pieces: Sequence[tuple[Span, float]]) -> None:
    """Give each piece of a merged vector its length, in place: the second half of RDA.

    ``vector`` holds the weighted sum of unit vectors, a direction; ``pieces`` the weighted mean of
    the norms (Decoupled DiLoCo, arXiv:2604.21428). A piece without a direction stays zero.
    """
    for span, length in pieces:
        piece = vector[span.start : span.stop]
        norm = l2_norm(piece)
        if norm > 0:
            piece.mul_(length / norm)


@torch.no_grad()
def sum_of_squares(vector: Tensor) -> float:
    """By fp64 sums over a fixed binary tree: the same bits on any CPU, any thread count."""
    whole = vector.numel() // NORM_CHUNK
    tops = torch.empty(whole, NORM_TOP, dtype=torch.float64)
    for index in range(whole):
        squares = _squares(vector[index * NORM_CHUNK : (index + 1) * NORM_CHUNK])
        tops[index] = _fold(squares, NORM_TOP)
    # The last levels of all trees at once: one by one the calls would cost more than the sums.
    total = 0.0
    for square in _fold(tops.t().contiguous(), 1)[0].tolist() if whole else []:
        total += square
    if rest := vector.numel() % NORM_CHUNK:
        total += float(_fold(_squares(vector[-rest:]), 1)[0])
    return total


def _squares(vector: Tensor) -> Tensor:
    squares = vector.double()
    return squares.mul_(squares)


def _fold(values: Tensor, stop: int) -> Tensor:
    """Levels of the tree, along the first dimension and in place, until ``stop`` are left: the
    upper half is added onto the lower; a middle element waits for the next level."""
    count = values.shape[0]
    while count > stop:
        half = (count + 1) // 2
        values[: count - half].add_(values[half:count])
        count = half
    return values[:count]


def l2_norm(vector: Tensor) -> float:
    """L2 norm by :func:`sum_of_squares`; NaN where an element is not finite."""
    return _root(sum_of_squares(vector))


def _root(squares: float) -> float:
    return math.sqrt(squares) if math.isfinite(squares) else float("nan")


class ContentDigest:
    """Content address of bytes that come in pieces: the sha256 of the xxh3_128 of every 4 MiB.

    It is against damage and divergence, not against malice, and ten times as fast as sha256.
    Pieces must be multiples of 4 MiB, but for the last.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        for start in range(0, len(data), DIGEST_CHUNK):
            self._sha.update(xxhash.xxh3_128_digest(data[start : start + DIGEST_CHUNK]))

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def content_digest(data: memoryview) -> str:
    found = ContentDigest()
    found.update(data)
    return found.hexdigest()


def digest(vector: Tensor) -> str:
    """:class:`ContentDigest` of a flat fp32 CPU vector's bytes."""
    return content_digest(memoryview(vector.contiguous().numpy()).cast("B"))  # type: ignore[arg-type]
