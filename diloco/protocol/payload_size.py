"""What a payload weighs: the arithmetic that codecs, cost model and bench/ share.

What a whole round costs is :mod:`diloco.protocol.reduce_cost`'s.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CodecShape:
    """How a codec lays out its body: chunks of ``chunk`` values, each perhaps with a scale."""

    chunk: int
    bits: int
    """Of one value that is kept, its index included."""
    scale_bytes: int = 0


CODEC_SHAPES = {
    "fp32": CodecShape(chunk=1, bits=32),
    "bf16": CodecShape(chunk=1, bits=16),
    "int8": CodecShape(chunk=256, bits=8, scale_bytes=4),
    "e3m0": CodecShape(chunk=256, bits=4, scale_bytes=4),
    "topk": CodecShape(chunk=4096, bits=24, scale_bytes=4),
}
DEFAULT_TOPK = 64
"""Values that ``topk`` keeps of a chunk (arXiv:2508.15706)."""


def payload_bytes(numel: int, codec: str, *, topk: int = DEFAULT_TOPK) -> int:
    """Body of one payload, Sc. A short last chunk keeps ``min(topk, its length)`` values."""
    shape = CODEC_SHAPES[codec]
    whole, tail = divmod(numel, shape.chunk)
    kept = whole * min(topk, shape.chunk) + min(topk, tail) if codec == "topk" else numel
    return (kept * shape.bits + 7) // 8 + (whole + (tail > 0)) * shape.scale_bytes


def ring_all_reduce(*, numel: int, replicas: int) -> float:
    """Bytes each replica sends *and* receives in one fp32 ring all-reduce of the gradients: what
    data parallel training moves at every step, for comparison."""
    return 2 * 2 * (replicas - 1) / replicas * 4 * numel
