"""Codecs with blocks of 256 values and one fp32 scale each: int8 and 4-bit E3M0.

A block is its scale, then its values. The scale is derived from the block's largest magnitude. A
block with NaN or infinity has the scale NaN, so all its values decode to NaN; a block below
:data:`TINY` has the scale zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codecs.base import ChunkedCodec, copy_as

SCALE_BYTES = 4

TINY = 2.0**-100
"""A block whose largest magnitude is smaller is encoded as zeros, so that neither a scale nor its
inverse leaves the normal range."""

LARGEST_INT8_SCALE = torch.finfo(torch.float32).max / 128
"""Keeps 127 times a scale below infinity, whichever way the scale was rounded."""


def largest_of(rows: Tensor) -> Tensor:
    """Return the largest magnitude of each row of (n, m), as (n, 1); NaN for a row with NaN or
    infinity."""
    largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
    return largest.masked_fill_(largest == torch.inf, torch.nan)


def scaled_to(unit: float, rows: Tensor, largest: Tensor) -> Tensor:
    """Return ``rows`` (n, m) scaled to -unit..unit, in new memory; zeros for rows without a valid
    scale."""
    scaled = rows * (unit / largest).masked_fill_(~(largest >= TINY), 0.0)
    if bool(largest.isnan().any()):  # NaN and infinity times zero; the scale is NaN there
        scaled.nan_to_num_(nan=0.0)
    return scaled


def quantise(rows: Tensor, out: Tensor) -> Tensor:
    """Write ``rows`` (n, m) as (n, m) int8 into ``out``; return their scales, (n, 1) fp32."""
    largest = largest_of(rows)
    out.copy_(scaled_to(127.0, rows, largest).round_())
    # Divides by a tensor: for a Python number CUDA multiplies by the inverse, which rounds
    # differently.
    scale = (largest / torch.full_like(largest, 127)).clamp_(max=LARGEST_INT8_SCALE)
    return scale.masked_fill_(largest < TINY, 0.0)


def put_scale(scale: Tensor, body: Tensor) -> None:
    """Write (n, 1) fp32 to the first bytes of each row of ``body``; NaN with the same bits on every
    device."""
    scale = scale.masked_fill(scale.isnan(), torch.nan)
    body[:, :SCALE_BYTES] = scale.view(torch.uint8)


def get_scale(body: Tensor) -> Tensor:
    """Return (n, 1) fp32 from the first bytes of each row of ``body``."""
    return copy_as(body[:, :SCALE_BYTES], torch.float32)


class Int8(ChunkedCodec):
    """Symmetric int8: value = scale * q with q in -127..127 and scale = absmax / 127, rounded half
    to even. The error is at most half a scale."""

    name = "int8"

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        put_scale(quantise(rows, out[:, SCALE_BYTES:].view(torch.int8)), out)

    def decode_rows(self, body: Tensor, out: Tensor) -> None:
        out.copy_(body[:, SCALE_BYTES:].view(torch.int8))
        out.mul_(get_scale(body))


class E3M0(ChunkedCodec):
    """One sign bit, three exponent bits, no mantissa (Streaming DiLoCo, arXiv:2501.18512).

    Exponent codes 1..7 are scale * 2^-6 .. scale * 2^0 with scale = absmax. Code 0 is zero, as in
    IEEE formats: rows that no token touched have a gradient of exactly zero, and without error
    feedback a made-up value would never be corrected. The sign bit of code 0 has no meaning. The
    low four bits of a byte are the earlier value; an odd last value is followed by a zero.

    Between 2^e and 2^(e+1), values are rounded up from 1.453125 * 2^e. Rounding to the nearest
    (1.5) has the smallest error per value but shrinks normal data by 3.5 %; the nearest logarithm
    (sqrt 2) expands them by 2.3 %. Noise averages out over replicas, a common factor does not: with
    this threshold the factor is one within 0.5 %, at a relative error of 0.197 (minimum 0.195).
    Stochastic rounding is unbiased at an error of 0.283. Below 2^-6 the nearer of 2^-6 and zero is
    used. ``bench/codec_error.py`` measures these figures.
    """

    name = "e3m0"

    LEVELS = 7
    UNIT = float(2**LEVELS)
    """Magnitudes are scaled to 0..128, so that the inverse of a scale is never subnormal; code c
    stands for 2^c there."""
    OCTAVE = 1 << 23
    """An increment of the exponent by one, as fp32 bits."""
    ROUND_UP = 0x460000
    """``OCTAVE`` minus the mantissa bits of 1.453125: larger values carry into the next
    exponent."""
    BIAS = 127
    """Exponent bits of 1."""

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        largest = largest_of(rows)
        put_scale(largest.masked_fill(largest < TINY, 0.0), out)

        # Integer arithmetic on the bits is faster here than comparing floats.
        bits = scaled_to(self.UNIT, rows, largest).view(torch.int32)
        sign = bits >> 28
        sign &= 8
        bits &= 0x7FFFFFFF
        # The exponent of 2 for everything from 1 on: the smallest level begins half-way to zero.
        smallest = (bits + self.OCTAVE).clamp_(max=(self.BIAS + 1) << 23)
        bits += self.ROUND_UP
        torch.maximum(bits, smallest, out=bits)
        bits >>= 23
        bits.clamp_(min=self.BIAS)
        bits -= self.BIAS
        bits |= sign
        code = bits.to(torch.uint8)
        if code.shape[1] % 2:
            code = torch.nn.functional.pad(code, (0, 1))
        pairs = code.view(torch.int16)
        pairs |= pairs >> 4
        out[:, SCALE_BYTES:] = pairs.to(torch.uint8)

    def decode_rows(self, body: Tensor, out: Tensor) -> None:
        pairs = body[:, SCALE_BYTES:].to(torch.int16)
        pairs |= pairs << 4
        pairs &= 0x0F0F
        code = pairs.view(torch.uint8)
        sign = code >> 3
        code &= 7
        # 0, 1, 2, 4 .. 64, negated by two's complement. The multiplications are exact.
        level = torch.bitwise_left_shift(1, code)
        level >>= 1
        level ^= sign.neg()
        level += sign
        out.copy_(level.view(torch.int8)[:, : out.shape[1]])
        out.mul_(get_scale(body) / 2 ** (self.LEVELS - 1))
