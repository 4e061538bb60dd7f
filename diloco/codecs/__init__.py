"""Codecs: a flat fp32 vector to bytes and back.

A codec quantises what travels; sums are always taken in fp32 after decoding. All work chunk by
chunk, so that any aligned slice can be encoded, sent, checked and decoded alone. Error feedback
is not theirs: it belongs to who knows whether the round took the payload.

========  =======================================================================
fp32      as it is
bf16      rounded to nearest even
int8      blocks of 256, one scale each
e3m0      4 bits: sign and exponent, blocks of 256 (Streaming DiLoCo, arXiv:2501.18512)
topk      the largest of every 4096, in int8 (SparseLoCo, arXiv:2508.15706)
========  =======================================================================
"""

from __future__ import annotations

from diloco.codecs.base import ALIGNMENT, Codec
from diloco.codecs.blocks import E3M0, Int8
from diloco.codecs.plain import Bf16, Fp32
from diloco.codecs.topk import TopK
from diloco.protocol.payload_size import CODEC_SHAPES, DEFAULT_TOPK
from diloco.protocol.reduce_cost import reduced_codec

__all__ = ["ALIGNMENT", "Codec", "get_codec", "reduced_codec"]


def get_codec(name: str, *, topk: int = DEFAULT_TOPK) -> Codec:
    """The codec of that name; :class:`ValueError` for an unknown one. ``topk`` is how many values
    of 4096 the codec ``topk`` keeps; the others have no use for it."""
    match name:
        case "fp32":
            return Fp32()
        case "bf16":
            return Bf16()
        case "int8":
            return Int8()
        case "e3m0":
            return E3M0()
        case "topk":
            return TopK(topk)
    raise ValueError(f"expected a codec of {', '.join(CODEC_SHAPES)}, found {name!r}")
