"""Components of vectors along others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from diloco.protocol.blocks import Span

PIECE = 2**16
"""Elements of a step; in fp64, both vectors' pieces fit into a core's cache."""


@torch.no_grad()
def coefficient(
    vector: Tensor, direction: Tensor, spans: Iterable[Span], *, total: Callable[[float], float]
) -> float:
    """Return c >= 0 such that ``c * direction`` is the component of ``vector`` along ``direction``,
    both (n,) fp32, over the elements of ``spans``: ``vector·direction / direction·direction``.

    0 if the vectors point in opposite directions, or if ``direction`` is zero, so small that c is
    not finite, or not finite.
    ``total`` adds a sum over the ranks that hold the other elements. Sums are fp64 and the result
    is rounded to fp32, so that it hardly ever depends on their order.
    """
    dot = squares = 0.0
    for piece in _pieces(spans):
        y = direction[piece].double()
        dot += float(torch.dot(vector[piece].double(), y))
        squares += float(torch.dot(y, y))
    dot, squares = total(dot), total(squares)
    if not (squares > 0 and math.isfinite(squares) and math.isfinite(dot)):
        return 0.0
    rounded = torch.tensor(max(0.0, dot / squares), dtype=torch.float32).item()
    return rounded if math.isfinite(rounded) else 0.0


@torch.no_grad()
def add_scaled(vector: Tensor, direction: Tensor, factor: float) -> None:
    """Add ``factor * direction`` to ``vector``, in place. Multiplications and additions are
    separate: fused ones differ between machines."""
    for piece in _pieces([Span(0, vector.numel())]):
        vector[piece].add_(direction[piece].mul(factor))


def _pieces(spans: Iterable[Span]) -> Iterator[slice]:
    for span in spans:
        for start in range(span.start, span.stop, PIECE):
            yield slice(start, min(start + PIECE, span.stop))
