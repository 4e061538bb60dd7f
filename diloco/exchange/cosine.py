"""How far a replica's own pseudo-gradient points where the group's mean does.

The cosine is a figure for people: nothing is decided by it, and nothing that is trained is changed.
Of replicas that agree it is near 1; it falls as they drift apart (more inner steps, other data),
towards ``1/sqrt(N)`` where N of them have nothing in common but their length.

What it leaves out: the cosine between two replicas, which would need the other's payload whole, and
one per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from diloco.exchange.payload import slices
from diloco.protocol.blocks import Span

PIECE = 2**16
"""Elements made fp64 at a time: both vectors' stay in a core's cache."""


@torch.no_grad()
def cosine_to_mean(own: Callable[[Span], Tensor], mean: Tensor) -> float | None:
    """``own·mean / (|own| |mean|)`` over all elements of a fragment; None where either has no
    direction (zero) or a length that is not a number.

    ``own`` gives the elements of a slice of what this replica contributed, as its payload *decodes*
    and everybody else has summed it; not of the vector before it was encoded. ``mean`` (n,) fp32 is
    the merged pseudo-gradient as the outer step takes it: past the reduced codec and, under RDA,
    with its lengths. Sums are fp64; nothing is changed, and the memory taken is a few slices.
    """
    dot = squares = mean_squares = 0.0
    for where in slices(Span(0, mean.numel()), mean.numel()):
        sent = own(where)
        merged = mean[where.start : where.stop]
        for one, other in zip(torch.split(sent, PIECE), torch.split(merged, PIECE), strict=True):
            x, y = one.double(), other.double()
            dot += float(torch.dot(x, y))
            squares += float(torch.dot(x, x))
            mean_squares += float(torch.dot(y, y))
    lengths = math.sqrt(squares) * math.sqrt(mean_squares)
    if not (0 < lengths < math.inf and math.isfinite(dot)):
        return None
    return max(-1.0, min(1.0, dot / lengths))
