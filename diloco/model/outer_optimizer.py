"""The outer optimization of DiLoCo: weighted sums of pseudo-gradients, the outer step, norms and
digests.

Sign: the pseudo-gradient is ``base - local`` (arXiv:2311.08105, algorithm 1, line 12), so the outer
optimizer *descends* along it.

All operations run on the CPU in fp32, also on weights and state that are stored as bf16
(:mod:`diloco.model.rounding`), as separate multiplications and additions in a fixed order, so
that every replica computes the same bits (invariant I3). Not used: ``torch.optim``, ``alpha=``,
``lerp`` and ``addcmul``, whose fused multiply-adds differ between machines, and ``sum``, whose
order depends on the number of threads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy

import torch
import xxhash
from torch import Tensor

from diloco.model.outer_rules import Nesterov, OuterRule, load_rule
from diloco.model.rounding import DTYPES, RandomRounding
from diloco.protocol.blocks import Span
from diloco.protocol.outer_schedule import outer_lr_at
from diloco.protocol.settings import GroupSettings

DIGEST_CHUNK = 4 * 2**20
NORM_CHUNK = 2**16
"""Elements whose squares are added in a binary tree; a power of two that fits into a core's
cache."""
PIECE = NORM_CHUNK * 16
"""Elements of a piece of the outer step."""
FAST_PIECE = 2**16
SMALLEST_FAST, LARGEST_FAST = 1e-20, 1e37
"""Sums of squares in fp32 outside this range can have lost elements or be infinite."""
NORM_TOP = 256
"""Width of the top of a tree; its levels are too small to be added one tree at a time."""


class OuterOptimizer:
    """The outer step and its state, on flat CPU vectors.

    ``rule`` is by default :class:`~diloco.model.outer_rules.Nesterov` with ``momentum``;
    ``schedule`` maps the number of a committed round to its learning rate, by default ``lr``. The
    elements ``averaged`` do not follow the rule: they become the average of the contributors.
    ``dtypes`` are those of the master weights and of the state vectors, fp32 or bf16.
    """

    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        numel: int,
        rule: OuterRule | None = None,
        schedule: Callable[[int], float] | None = None,
        averaged: Sequence[Span] = (),
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    ) -> None:
        self.weights_dtype, self.state_dtype = dtypes
        self._rule = rule or Nesterov(momentum)
        self._lr_at = schedule or (lambda round: lr)
        self._averaged = averaged
        self.vectors = self.zeros(numel)
        """The state vectors by name, (numel,) of ``state_dtype``."""

    @classmethod
    def of(
        cls, settings: GroupSettings, numel: int, averaged: Sequence[Span] = ()
    ) -> OuterOptimizer:
        """Create the outer optimizer of a group. Raises the errors of
        :func:`~diloco.model.outer_rules.load_rule`."""
        return cls(
            lr=settings.outer_lr,
            momentum=settings.outer_momentum,
            numel=numel,
            rule=load_rule(settings),
            schedule=lambda round: outer_lr_at(settings, round),
            averaged=averaged,
            dtypes=(DTYPES[settings.master_dtype], DTYPES[settings.momentum_dtype]),
        )

    def zeros(self, numel: int) -> dict[str, Tensor]:
        """Return new state vectors of ``numel`` elements by name."""
        return {name: torch.zeros(numel, dtype=self.state_dtype) for name in self._rule.vectors}

    def with_vectors(self, vectors: dict[str, Tensor]) -> OuterOptimizer:
        """Return this optimizer with other state vectors."""
        other = copy(self)
        other.vectors = vectors
        return other

    @torch.no_grad()
    def step(
        self,
        weights: Tensor,
        gradient: Tensor,
        where: Span | None = None,
        *,
        round: int = 1,
        present: float = 1.0,
        position: int | None = None,
    ) -> float:
        """Update the elements ``where`` of ``weights`` (numel,), or all, in place along
        ``gradient`` (n,), and return the L2 norm of the change before it is rounded, whose last
        bits depend on the CPU. ``round`` is the number of the committed round, from 1. ``present``
        is the sum of the contributions' weights, below 1 if a replica is late: the averaged
        elements are divided by it. ``position`` is that of the first element in the flat vector,
        by default its index."""
        where = where or Span(0, weights.numel())
        offset = 0 if position is None else position - where.start
        stored = {"weights": weights, **{f"state {n}": v for n, v in self.vectors.items()}}
        rounding = {name: RandomRounding(round, name) for name in stored}
        lr, squares = self._lr_at(round), 0.0
        for start in range(where.start, where.stop, PIECE):
            piece = slice(start, min(start + PIECE, where.stop))
            change = gradient[piece.start - where.start : piece.stop - where.start]
            held = {name: vector[piece].float() for name, vector in stored.items()}
            state = {name: held[f"state {name}"] for name in self.vectors}
            update = self._rule.update(change, state, lr=lr)
            for span in self._averaged:
                first, last = max(span.start, piece.start), min(span.stop, piece.stop)
                if first < last:
                    inside = slice(first - piece.start, last - piece.start)
                    update[inside] = change[inside].mul(1.0 / present)
            held["weights"].sub_(update)
            for name, vector in stored.items():
                if vector.dtype != torch.float32:  # otherwise ``held`` is the vector itself
                    at = piece.start + offset
                    rounding[name].store(held[name], vector[piece], position=at)
            squares += fast_sum_of_squares(update)
        return root(squares)


class WeightedSum:
    """``0 + w1*x1 + w2*x2 + ...`` over fp32 CPU vectors in the given order, accumulated in
    ``total`` (numel,) fp32."""

    def __init__(self, total: Tensor) -> None:
        self.total = total.zero_()
        self._scratch = torch.empty(0)

    @torch.no_grad()
    def add(self, start: int, vector: Tensor, weight: float) -> None:
        """Add ``weight * vector`` to the elements from ``start``; ``vector`` is not modified."""
        if self._scratch.numel() < vector.numel():
            self._scratch = torch.empty_like(vector)
        scaled = torch.mul(vector, weight, out=self._scratch[: vector.numel()])
        self.total[start : start + vector.numel()].add_(scaled)


@torch.no_grad()
def rescale(vector: Tensor, pieces: Sequence[tuple[Span, float]]) -> None:
    """Scale each piece of a merged vector to its norm, in place: the second half of RDA.

    ``vector`` holds weighted sums of unit vectors, that is directions; ``pieces`` the weighted mean
    of the norms (Decoupled DiLoCo, arXiv:2604.21428). A zero piece stays zero.
    """
    for span, length in pieces:
        piece = vector[span.start : span.stop]
        scale(piece, l2_norm(piece), length)


def scale(piece: Tensor, norm: float, length: float) -> None:
    """Scale a piece of a tensor whose norm is to become ``length``, in place. A zero tensor stays
    zero."""
    if norm > 0:
        piece.mul_(length / norm)


def sum_of_squares(vector: Tensor) -> float:
    """Return the sum of squares in fp64, added in a fixed binary tree: the same bits on any CPU and
    with any number of threads."""
    return added(chunk_squares(vector))


def added(sums: Iterable[float]) -> float:
    """Add the sums of squares of all chunks of a vector, in order."""
    total = 0.0
    for square in sums:
        total += square
    return total


@torch.no_grad()
def chunk_squares(vector: Tensor) -> list[float]:
    """Return the sum of squares of every :data:`NORM_CHUNK` elements."""
    whole = vector.numel() // NORM_CHUNK
    tops = torch.empty(whole, NORM_TOP, dtype=torch.float64)
    for index in range(whole):
        squares = _squares(vector[index * NORM_CHUNK : (index + 1) * NORM_CHUNK])
        tops[index] = _fold(squares, NORM_TOP)
    # The last levels of all trees at once: separate calls would cost more than the sums.
    sums: list[float] = _fold(tops.t().contiguous(), 1)[0].tolist() if whole else []
    if rest := vector.numel() % NORM_CHUNK:
        sums.append(float(_fold(_squares(vector[-rest:]), 1)[0]))
    return sums


@torch.no_grad()
def fast_sum_of_squares(vector: Tensor) -> float:
    """Return the sum of squares within a relative error of 1e-5; its last bits depend on the CPU.

    Pieces are summed in fp32, and those whose sum could leave its range by :func:`sum_of_squares`.
    """
    total = 0.0
    for piece in torch.split(vector, FAST_PIECE):
        squares = float(torch.dot(piece, piece))
        is_safe = SMALLEST_FAST < squares < LARGEST_FAST
        total += squares if is_safe else sum_of_squares(piece)
    return total


def _squares(vector: Tensor) -> Tensor:
    squares = vector.double()
    return squares.mul_(squares)


def _fold(values: Tensor, stop: int) -> Tensor:
    """Add levels of the tree along the first dimension, in place, until ``stop`` values are left:
    the upper half is added to the lower; a middle element moves to the next level."""
    count = values.shape[0]
    while count > stop:
        half = (count + 1) // 2
        values[: count - half].add_(values[half:count])
        count = half
    return values[:count]


def l2_norm(vector: Tensor) -> float:
    """Return the L2 norm by :func:`sum_of_squares`; NaN if an element is not finite."""
    return root(sum_of_squares(vector))


def root(squares: float) -> float:
    return math.sqrt(squares) if math.isfinite(squares) else float("nan")


class ContentDigest:
    """Content address of bytes that arrive in pieces: the sha256 of the xxh3_128 of every 4 MiB.

    Detects damage and divergence, not attacks, and is ten times as fast as sha256. All pieces but
    the last must be multiples of 4 MiB.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        """Add the next piece."""
        self.update_chunks(chunk_digests(data))

    def update_chunks(self, digests: bytes) -> None:
        """Add the next piece by its :func:`chunk_digests`."""
        self._sha.update(digests)

    def hexdigest(self) -> str:
        """Return the digest of the pieces so far."""
        return self._sha.hexdigest()


def chunk_digests(data: memoryview) -> bytes:
    """Return the xxh3_128 of every 4 MiB, 16 bytes each."""
    starts = range(0, len(data), DIGEST_CHUNK)
    return b"".join(xxhash.xxh3_128_digest(data[n : n + DIGEST_CHUNK]) for n in starts)


def vector_digests(vector: Tensor) -> bytes:
    """Return the :func:`chunk_digests` of a flat CPU vector's values in fp32, whatever its
    dtype."""
    if vector.dtype == torch.float32:
        return chunk_digests(vector_bytes(vector))
    pieces = torch.split(vector, DIGEST_CHUNK // torch.float32.itemsize)
    return b"".join(chunk_digests(vector_bytes(piece.float())) for piece in pieces)


def vector_bytes(vector: Tensor) -> memoryview:
    """Return the bytes of a flat fp32 CPU vector, without a copy if it is contiguous."""
    return memoryview(vector.contiguous().numpy()).cast("B")  # type: ignore[arg-type]


def content_digest(data: memoryview) -> str:
    """Return the :class:`ContentDigest` of ``data``."""
    content = ContentDigest()
    content.update(data)
    return content.hexdigest()


def digest(vector: Tensor) -> str:
    """Return the :class:`ContentDigest` of a flat CPU vector's values in fp32."""
    content = ContentDigest()
    content.update_chunks(vector_digests(vector))
    return content.hexdigest()
