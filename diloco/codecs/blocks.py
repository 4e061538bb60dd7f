"""Blocks of 256 values with one fp32 scale each: int8 and 4-bit E3M0.

A block is its scale, then its values. The scale comes from the block's largest magnitude. A block
with NaN or infinity gets a scale of NaN, which spoils all of it; a block below
:data:`TINY` gets a scale of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codecs.base import ChunkedCodec, copy_as

SCALE_BYTES = 4

TINY = 2.0**-100
"""A block whose largest magnitude is below this is encoded as zeros, so that neither a scale nor
its inverse leaves the normal range."""

LARGEST_INT8_SCALE = torch.finfo(torch.float32).max / 128
"""Keeps 127 scales below infinity, whichever way the scale was rounded."""


def largest_of(rows: Tensor) -> Tensor:
    """(n, 1) largest magnitude of each row of (n, m); NaN where a row has NaN or infinity."""
    largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
    return largest.masked_fill_(largest == torch.inf, torch.nan)


def scaled_to(unit: float, rows: Tensor, largest: Tensor) -> Tensor:
    """``rows`` (n, m) brought into -unit..unit, in new memory; zeros where nothing can do that."""
    scaled = rows * (unit / largest).masked_fill_(~(largest >= TINY), 0.0)
    if bool(largest.isnan().any()):  # NaN and infinity times zero: the scale tells of them
        scaled.nan_to_num_(nan=0.0)
    return scaled


def quantise(rows: Tensor, out: Tensor) -> Tensor:
    """Write ``rows`` (n, m) as (n, m) int8 into ``out``; returns their scales, (n, 1) fp32."""
    largest = largest_of(rows)
    out.copy_(scaled_to(127.0, rows, largest).round_())
    scale = (largest / 127).clamp_(max=LARGEST_INT8_SCALE)
    return scale.masked_fill_(largest < TINY, 0.0)


def put_scale(scale: Tensor, body: Tensor) -> None:
    """Write (n, 1) fp32 into the first bytes of each row of ``body``."""
    body[:, :SCALE_BYTES] = scale.view(torch.uint8)


def get_scale(body: Tensor) -> Tensor:
    """(n, 1) fp32 from the first bytes of each row of ``body``."""
    return copy_as(body[:, :SCALE_BYTES], torch.float32)


class Int8(ChunkedCodec):
    """Symmetric: value = scale * q with q in -127..127 and scale = absmax / 127, rounded half to
    even. The error is at most half a scale."""

    name = "int8"

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        put_scale(quantise(rows, out[:, SCALE_BYTES:].view(torch.int8)), out)

    def decode_rows(self, body: Tensor, out: Tensor) -> None:
        out.copy_(body[:, SCALE_BYTES:].view(torch.int8))
        out.mul_(get_scale(body))


class E3M0(ChunkedCodec):
    """One sign bit, three exponent bits, no mantissa (Streaming DiLoCo, arXiv:2501.18512).

    Exponent codes 1..7 are scale * 2^-6 .. scale * 2^0 with scale = absmax; code 0 is zero, as in
    an IEEE format, for rows that no token touched have a gradient of exactly zero and without
    error feedback nothing would ever take a made-up value back. Its sign bit means nothing. Of a
    byte the low four bits are the earlier value; an odd last one is followed by a zero.

    Between 2^e and 2^(e+1) values are rounded up from 1.453125 * 2^e. Rounding to the nearest
    (1.5) has the smallest error of one value, but shrinks normal data by 3.5 %; the nearest
    logarithm (sqrt 2) swells them by 2.3 %. Noise averages out over replicas, a common factor does
    not: with this threshold it is one within 0.5 %, at a relative error of 0.197 where 0.195 is
    the least. Rounding by chance has no bias at an error of 0.283. Below 2^-6 the nearest of 2^-6
    and zero is taken. (bench/codec_error.py measures them.)
    """

    name = "e3m0"

    LEVELS = 7
    UNIT = float(2**LEVELS)
    """Magnitudes are brought into 0..128, so that the inverse of no scale is subnormal; there code
    c stands for 2^c."""
    OCTAVE = 1 << 23
    """One more in the exponent, as fp32 bits."""
    ROUND_UP = 0x460000
    """``OCTAVE`` minus the mantissa bits of 1.453125: values from there on carry into the next."""
    BIAS = 127
    """Exponent bits of 1."""

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        largest = largest_of(rows)
        put_scale(largest.masked_fill(largest < TINY, 0.0), out)

        # Comparing floats is slower here than integer arithmetic on their bits.
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
        # 0, 1, 2, 4 .. 64, negative by two's complement. All factors that follow are exact.
        level = torch.bitwise_left_shift(1, code)
        level >>= 1
        level ^= sign.neg()
        level += sign
        out.copy_(level.view(torch.int8)[:, : out.shape[1]])
        out.mul_(get_scale(body) / 2 ** (self.LEVELS - 1))
