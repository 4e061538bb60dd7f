"""fp32 values as bf16, rounded up or down at random, with the same bits in every process.

A value between two bf16 values becomes the upper one with a probability equal to its position
between them, so that the mean error is zero. Rounding to the nearest would lose every change below
half a step of bf16, a 512th of a weight: an outer update is often smaller than that.

The random numbers are a function of a seed and of the position in the flat vector alone, computed
with integers. Pieces, threads, ranks and processors have no influence on the result.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor

PERIOD = 2**20
"""Elements after which the random numbers of a seed repeat."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtypes of the outer state by their names in the settings."""


class RandomRounding:
    """Rounding with the random numbers of one seed, such as a round and the name of a vector."""

    def __init__(self, *seed: object) -> None:
        self._seed = xxhash.xxh32_intdigest(" ".join(map(str, seed)).encode())
        self._numbers: Tensor | None = None

    def store(self, values: Tensor, into: Tensor, *, position: int) -> None:
        """Round ``values`` (n,) fp32 into ``into`` (n,) bf16; ``values`` are overwritten.

        ``position`` is that of the first element in the flat vector; n is at most :data:`PERIOD`.
        Values that are not finite become NaN.
        """
        values.masked_fill_(values.isfinite().logical_not_(), float("nan"))
        if self._numbers is None:
            once = torch.from_numpy(_numbers(self._seed))
            self._numbers = torch.cat([once, once])
        start = position % PERIOD
        bits = values.view(torch.int32)
        bits.add_(self._numbers[start : start + values.numel()])
        into.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def _numbers(seed: int) -> np.ndarray:
    """Return :data:`PERIOD` pseudo-random int32 from 0 to 65,535: the finalizer of MurmurHash3 over
    a counter."""
    bits = np.arange(PERIOD, dtype=np.uint32)
    bits *= np.uint32(0x9E3779B1)
    bits ^= np.uint32(seed)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(factor)
    bits ^= bits >> np.uint32(16)
    return (bits >> np.uint32(16)).astype(np.int32)
