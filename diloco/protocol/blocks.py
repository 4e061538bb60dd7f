"""How one fragment is cut: blocks that are checked, parts that are moved, shards that are reduced.

Everything is counted in elements first, because all codecs must be cut at the same places; a
codec turns a span of elements into bytes. Everybody computes the same cuts from the number of
elements alone, so nothing of this travels.

- A *block* has one checksum. It is a power of two of elements, so that every codec's own chunks
  (256 or 4096 elements) fit, and there are at most 1,024 of them unless the fragment is enormous.
- A *part* is one ranged read: as many whole blocks as fit into :data:`PART_BYTES` encoded.
- A *shard* is what one owner reduces: whole blocks, spread as evenly as they go.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.store.base import PART_BYTES

SMALLEST_BLOCK = 2**16
LARGEST_BLOCK = 2**22
BLOCKS = 1024

HEADER_BYTES = 256
"""Every payload begins with a header of this size; see :mod:`diloco.exchange.payload`."""


@dataclass(frozen=True)
class Span:
    """Elements from ``start`` to before ``stop``."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def block_elements(numel: int) -> int:
    """Elements of a block, of a fragment of ``numel`` elements."""
    block = SMALLEST_BLOCK
    while block < LARGEST_BLOCK and block * BLOCKS < numel:
        block *= 2
    return block


def block_count(numel: int) -> int:
    return -(-numel // block_elements(numel))


def shard_spans(numel: int, shards: int) -> list[Span]:
    """The elements of each shard: whole blocks; the first shards are one block longer if need be.

    With fewer blocks than shards the last shards are empty.
    """
    block, blocks = block_elements(numel), block_count(numel)
    spans, start = [], 0
    for shard in range(shards):
        count = blocks // shards + (1 if shard < blocks % shards else 0)
        stop = min(numel, start + count * block)
        spans.append(Span(start, stop))
        start = stop
    return spans


def part_spans(span: Span, *, block: int, block_bytes: int) -> list[Span]:
    """Cut a span that starts on a block into parts of at most :data:`PART_BYTES` encoded (a block
    that is larger is a part of its own)."""
    step = part_elements(block=block, block_bytes=block_bytes)
    return [
        Span(start, min(span.stop, start + step)) for start in range(span.start, span.stop, step)
    ]


def part_count(span: Span, *, block: int, block_bytes: int) -> int:
    """How many :func:`part_spans` would list: who only counts must not pay for a list that grows
    with the model."""
    return -(-span.numel // part_elements(block=block, block_bytes=block_bytes))


def part_elements(*, block: int, block_bytes: int) -> int:
    """Elements of all :func:`part_spans` but the last."""
    return block * max(1, PART_BYTES // max(1, block_bytes))
