"""Codecs: a flat fp32 vector to bytes and back.

A codec quantises the values that are transferred; sums are taken in fp32 after decoding. All codecs
work chunk by chunk, so that any aligned slice can be encoded, sent, checked and decoded separately.
Error feedback is not part of a codec, because it depends on whether the round includes the payload
(:mod:`diloco.exchange.error_feedback`).

=======  =======================================================================
fp32     unchanged
bf16     rounded to nearest even
int8     blocks of 256 with one scale each
e3m0     4 bits: sign and exponent, blocks of 256 (Streaming DiLoCo, arXiv:2501.18512)
topk     the largest of every 4096, in int8 (SparseLoCo, arXiv:2508.15706)
=======  =======================================================================
"""

from __future__ import annotations

from diloco.codecs.base import ALIGNMENT, Codec
from diloco.codecs.blocks import E3M0, Int8
from diloco.codecs.plain import Bf16, Fp32
from diloco.codecs.topk import TopK
from diloco.protocol.payload_size import CODEC_SHAPES, DEFAULT_TOPK

__all__ = ["ALIGNMENT", "Codec", "get_codec"]


def get_codec(name: str, *, topk: int = DEFAULT_TOPK) -> Codec:
    """Return the codec of that name; ``topk`` is the number of values of 4096 that the codec
    ``topk`` keeps. Raises :class:`ValueError` for an unknown name."""
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
