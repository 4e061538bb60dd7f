"""Blocks of 256 values with one fp32 scale each: int8 and 4-bit E3M0.

A block is its scale, then its values. The scale comes from the block's largest magnitude. A block
with NaN or infinity gets a scale of NaN, which spoils all of it; a block below
:data:`diloco.codecs.base.TINY` gets a scale of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.codecs.base import TINY, ChunkedCodec, absmax, copy_as

SCALE_BYTES = 4

LARGEST_INT8_SCALE = torch.finfo(torch.float32).max / 128
"""Keeps 127 scales below infinity, whichever way the scale was rounded."""


def int8_scales(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, inverse), (n, 1) fp32 each, that map each row of (n, m) onto -127..127.

    Both are functions of the largest magnitude alone, by single fp32 operations.
    """
    largest = absmax(rows)
    zero = largest < TINY
    bad = ~torch.isfinite(largest)
    scale = (largest / 127).clamp_(max=LARGEST_INT8_SCALE)
    inverse = 127 / largest
    return (
        scale.masked_fill_(zero, 0.0).masked_fill_(bad, torch.nan),
        inverse.masked_fill_(zero | bad, 0.0),
    )


def to_int8(rows: Tensor, inverse: Tensor, out: Tensor) -> None:
    """Round ``rows`` (n, m) times ``inverse`` (n, 1), half to even, into ``out`` (n, m) int8."""
    scaled = rows * inverse
    scaled.round_()
    if bool((inverse == 0).any()):  # a NaN or infinity times zero: no integer is right, choose one
        scaled.nan_to_num_(nan=0.0)
    out.copy_(scaled)


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
        scale, inverse = int8_scales(rows)
        put_scale(scale, out)
        to_int8(rows, inverse, out[:, SCALE_BYTES:].view(torch.int8))

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
    not, so the threshold is where both measured zero within 0.4 %: relative error 0.197 where 0.195
    is the least. Stochastic rounding has no bias at an error of 0.283. Below 2^-6 the
    nearest of 2^-6 and zero is taken.
    """

    name = "e3m0"

    LEVELS = 7
    UNIT = float(2**LEVELS)
    """Magnitudes are brought into 0..128, so that the inverse of no scale is subnormal; there code
    c stands for 2^c."""
    ROUND_UP_BITS = 0x460000
    """2^23 minus the mantissa bits of 1.453125: added to a float's bits it carries into the
    exponent from there on."""
    ONE_BITS = 0x3F800000
    BIAS = 127

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        largest = absmax(rows)
        zero = largest < TINY
        bad = ~torch.isfinite(largest)
        inverse = (self.UNIT / largest).masked_fill_(zero | bad, 0.0)
        put_scale(largest.masked_fill_(zero, 0.0).masked_fill_(bad, torch.nan), out)

        scaled = rows * inverse
        if bool(bad.any()):
            scaled.nan_to_num_(nan=0.0)
        bits = scaled.view(torch.int32)
        sign = (bits < 0).to(torch.uint8)
        bits &= 0x7FFFFFFF
        smallest = (bits >= self.ONE_BITS).to(torch.uint8)
        bits += self.ROUND_UP_BITS
        bits >>= 23
        bits -= self.BIAS
        bits.clamp_(min=0, max=self.LEVELS)
        code = bits.to(torch.uint8)
        # Below 1.453 the carry yields code 0 at most: the comparison alone decides between zero and
        # the smallest level.
        torch.maximum(code, smallest, out=code)
        code |= sign << 3
        if code.shape[1] % 2:
            code = torch.nn.functional.pad(code, (0, 1))
        pairs = code.view(torch.int16)
        pairs |= pairs >> 4
        out[:, SCALE_BYTES:] = pairs.to(torch.uint8)

    def decode_rows(self, body: Tensor, out: Tensor) -> None:
        width = out.shape[1]
        table = _e3m0_pairs().to(out.device)
        pairs = table.index_select(0, body[:, SCALE_BYTES:].reshape(-1).to(torch.int32))
        torch.mul(pairs.view(out.shape[0], -1)[:, :width], get_scale(body), out=out)


def _e3m0_pairs() -> Tensor:
    """(256, 2) fp32: what the two halves of each byte stand for, at scale one."""
    magnitudes = torch.tensor([0.0] + [2.0 ** (code - E3M0.LEVELS) for code in range(1, 8)])
    values = torch.cat([magnitudes, -magnitudes])
    values[8] = 0.0
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
