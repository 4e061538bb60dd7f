"""Codecs: a flat fp32 vector to bytes and back.

A codec quantises the values that are transferred; sums are taken in fp32 after decoding. All codecs
work chunk by chunk, so that any aligned slice can be encoded, sent, checked and decoded separately.
Error feedback is not part of a codec, because it depends on whether the round includes the payload
(:mod:`diloco.exchange.error_feedback`).
"""

from __future__ import annotations

from collections.abc import Callable

from diloco.codecs.base import ALIGNMENT, Codec
from diloco.codecs.blocks import E3M0, Int8
from diloco.codecs.plain import Bf16, Fp32
from diloco.codecs.topk import TopK
from diloco.protocol.payload_size import CODEC_SHAPES, DEFAULT_TOPK

__all__ = ["ALIGNMENT", "Codec", "get_codec"]

_CODECS: dict[str, Callable[[], Codec]] = {
    codec.name: codec
    for codec in (
        Fp32,
        Bf16,
        Int8,
        E3M0,
    )
}
"""Codecs without an argument."""


def get_codec(name: str, *, topk: int = DEFAULT_TOPK) -> Codec:
    """Return the codec of that name; ``topk`` is the number of values of 4096 that the codec
    ``topk`` keeps. Raises :class:`ValueError` for an unknown name."""
    if name == TopK.name:
        return TopK(topk)
    if name in _CODECS:
        return _CODECS[name]()
    raise ValueError(f"expected a codec of {', '.join(CODEC_SHAPES)}, found {name!r}")
