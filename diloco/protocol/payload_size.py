"""The list of codecs and the sizes of payloads, without torch.

:mod:`diloco.protocol.reduce_cost` computes the cost of a whole round.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CodecShape:
    """Layout of a codec's body: chunks of ``chunk`` values, each with ``scale_bytes`` of scale."""

    chunk: int
    bits: int
    """Bits per kept value, including its index."""
    scale_bytes: int = 0
    is_sparse: bool = False
    """Whether only the setting ``topk`` of a chunk's values are kept."""
    own_mean: bool = False
    """Whether the full mean of such payloads is stored in this codec; otherwise it is fp32."""


CODEC_SHAPES = {
    "fp32": CodecShape(chunk=1, bits=32, own_mean=True),
    "bf16": CodecShape(chunk=1, bits=16, own_mean=True),
    "int8": CodecShape(chunk=256, bits=8, scale_bytes=4),
    "e3m0": CodecShape(chunk=256, bits=4, scale_bytes=4),
    "topk": CodecShape(chunk=4096, bits=24, scale_bytes=4, is_sparse=True),
}
"""Codecs by name: the choices of the setting ``codec``."""
FULL_MEAN = "full"
"""The value of ``mean_codec`` for a mean without residual."""
LOW_BIT_CODECS = tuple(
    name for name, shape in CODEC_SHAPES.items() if shape.scale_bytes and not shape.is_sparse
)
"""The other values of ``mean_codec``: every value is kept, with an error relative to the largest
of its chunk."""
RESIDUAL_CODEC = "int8"
"""Codec of the residual of a low-bit mean."""
RESIDUAL_REACH = 3
"""Rounds of a fragment in which its residual can be read. After that many void rounds it is
dropped, because it can be what makes them void."""
CHECKSUM_BYTES = 8
"""Size of a block's checksum."""
DEFAULT_TOPK = 64
"""Values that ``topk`` keeps per chunk (SparseLoCo, arXiv:2508.15706)."""


def payload_bytes(numel: int, codec: str, *, topk: int = DEFAULT_TOPK) -> int:
    """Return the size of an encoded vector in bytes. A short last chunk keeps ``min(topk, its
    length)`` values."""
    shape = CODEC_SHAPES[codec]
    whole, tail = divmod(numel, shape.chunk)
    kept = whole * min(topk, shape.chunk) + min(topk, tail) if shape.is_sparse else numel
    return (kept * shape.bits + 7) // 8 + (whole + (tail > 0)) * shape.scale_bytes


def reduced_codec(codec: str, mean_codec: str = FULL_MEAN) -> str:
    """Return the codec of the stored mean of payloads in ``codec``.

    A full mean is fp32 for the lossy codecs, because compressing it again would add a second error.
    A low-bit mean carries that error over to the next round (:mod:`diloco.exchange.low_bit_mean`).
    """
    if mean_codec != FULL_MEAN:
        return mean_codec
    return codec if CODEC_SHAPES[codec].own_mean else "fp32"


def checked_bytes(numel: int, codec: str, *, block: int, topk: int = DEFAULT_TOPK) -> int:
    """Return the size of ``numel`` elements from a block boundary on: encoded blocks of ``block``
    elements, each with its checksum."""
    return payload_bytes(numel, codec, topk=topk) + CHECKSUM_BYTES * -(-numel // block)


def ring_all_reduce(*, numel: int, replicas: int) -> float:
    """Return the bytes that each replica sends *and* receives in one fp32 ring all-reduce: the
    traffic of one data-parallel step, for comparison."""
    return 2 * 2 * (replicas - 1) / replicas * 4 * numel
