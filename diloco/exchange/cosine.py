"""Cosine between a replica's own pseudo-gradient and the group's mean.

A metric for display: no decision depends on it and no trained value changes. It is near 1 for
replicas that agree and falls as they drift apart (more inner steps, different data), towards
``1/sqrt(N)`` for N replicas whose pseudo-gradients are orthogonal and equally long.

Not computed: the cosine between two replicas, which would need the whole payload of the other one,
and a cosine per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from diloco.exchange.payload import slices
from diloco.protocol.blocks import Span

PIECE = 2**16
"""Elements converted to fp64 at a time; both vectors' pieces fit into a core's cache."""


Products: TypeAlias = tuple[float, float, float]
"""``own·mean``, ``own·own`` and ``mean·mean`` of some elements."""


def cosine_of(parts: Iterable[Products]) -> float | None:
    """Return ``own·mean / (|own| |mean|)`` over all parts of a fragment; None if either norm is
    zero or not finite."""
    dot = squares = mean_squares = 0.0
    for part in parts:
        dot, squares, mean_squares = dot + part[0], squares + part[1], mean_squares + part[2]
    lengths = math.sqrt(squares) * math.sqrt(mean_squares)
    if not (0 < lengths < math.inf and math.isfinite(dot)):
        return None
    return max(-1.0, min(1.0, dot / lengths))


def cosine_to_mean(own: Callable[[Span], Tensor], mean: Tensor) -> float | None:
    """Return the cosine over a whole fragment; arguments as for :func:`products`."""
    return cosine_of([products(own, mean, numel=mean.numel())])


@torch.no_grad()
def products(own: Callable[[Span], Tensor], mean: Tensor, *, numel: int) -> Products:
    """Return the products over the elements of a part of a fragment of ``numel`` elements.

    ``own`` returns the elements of a slice of this replica's contribution as its payload *decodes*,
    not of the vector before encoding. ``mean`` (n,) fp32 is the merged pseudo-gradient that the
    outer step applies: after the reduced codec and, with RDA, scaled to its norms. Sums are fp64.
    Nothing is modified; memory use is a few slices.
    """
    dot = squares = mean_squares = 0.0
    for where in slices(Span(0, mean.numel()), numel):
        contributed = own(where)
        merged = mean[where.start : where.stop]
        for own_piece, mean_piece in zip(
            torch.split(contributed, PIECE), torch.split(merged, PIECE), strict=True
        ):
            x, y = own_piece.double(), mean_piece.double()
            dot += float(torch.dot(x, y))
            squares += float(torch.dot(x, x))
            mean_squares += float(torch.dot(y, y))
    return dot, squares, mean_squares
