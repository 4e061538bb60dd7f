"""How a fragment is divided: blocks are checked, parts are transferred, shards are reduced.

Boundaries are in elements, because all codecs must divide a fragment at the same places; a codec
converts a span of elements to bytes. Every process computes the same boundaries from the number of
elements, so they are never stored.

- A *block* has one checksum. Its size is a power of two of elements, so that every codec's chunks
  (256 or 4096 elements) fit, and a fragment has at most 1,024 blocks unless it is very large.
- A *part* is one ranged read: as many whole blocks as fit into :data:`PART_BYTES` when encoded.
- A *shard* is reduced by one owner: whole blocks, distributed as evenly as possible.
- A *slice* belongs to one rank of a replica of several ranks: whole units of at least 4 MiB in
  fp32, so that the digests of the slices combine to that of the fragment.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.store.base import PART_BYTES

SMALLEST_BLOCK = 2**16
LARGEST_BLOCK = 2**22
BLOCKS = 1024

SLICE_UNIT = 2**20
"""Smallest unit of a slice in elements: a chunk of a digest
(:mod:`diloco.model.outer_optimizer`)."""
MAX_SLICES = 1024
"""Maximum number of slices of a payload."""

HEADER_BYTES = 256
"""Size of the header of every payload; see :mod:`diloco.exchange.payload`."""


@dataclass(frozen=True)
class Span:
    """The elements from ``start`` (inclusive) to ``stop`` (exclusive)."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def block_elements(numel: int) -> int:
    """Return the elements per block of a fragment of ``numel`` elements."""
    block = SMALLEST_BLOCK
    while block < LARGEST_BLOCK and block * BLOCKS < numel:
        block *= 2
    return block


def shard_spans(numel: int, shards: int) -> list[Span]:
    """Return the span of each shard: whole blocks, the first shards one block longer where needed.

    With fewer blocks than shards the last shards are empty.
    """
    return _divided(numel, shards, unit=block_elements(numel))


def largest_shard(numel: int, shards: int) -> Span:
    """Return the first of :func:`shard_spans` without building the list."""
    block = block_elements(numel)
    blocks = -(-numel // block)
    return Span(0, min(numel, -(-blocks // shards) * block))


def slice_count(numel: int, ranks: int) -> int:
    """Return the number of slices of a fragment, at least 1: one per rank, as far as each has at
    least one unit."""
    return max(1, min(ranks, MAX_SLICES, -(-numel // _slice_unit(numel))))


def slice_spans(numel: int, slices: int) -> list[Span]:
    """Return the span of each slice: whole units, the first slices one unit longer where
    needed."""
    return _divided(numel, slices, unit=_slice_unit(numel))


def _slice_unit(numel: int) -> int:
    return max(SLICE_UNIT, block_elements(numel))


def _divided(numel: int, count: int, *, unit: int) -> list[Span]:
    units = -(-numel // unit)
    spans, start = [], 0
    for index in range(count):
        own = units // count + (1 if index < units % count else 0)
        stop = min(numel, start + own * unit)
        spans.append(Span(start, stop))
        start = stop
    return spans


def part_spans(span: Span, *, block: int, block_bytes: int) -> list[Span]:
    """Divide a span that starts at a block boundary into parts of at most :data:`PART_BYTES`
    encoded bytes. A larger block is one part."""
    step = part_elements(block=block, block_bytes=block_bytes)
    return [
        Span(start, min(span.stop, start + step)) for start in range(span.start, span.stop, step)
    ]


def part_count(span: Span, *, block: int, block_bytes: int) -> int:
    """Return the length of :func:`part_spans` without building the list, which grows with the
    model."""
    return -(-span.numel // part_elements(block=block, block_bytes=block_bytes))


def read_back_ranges(size_bytes: int) -> list[tuple[int, int]]:
    """Divide the bytes of a part that its writer reads back into ranges (start, length) of about a
    quarter of :data:`PART_BYTES`: nothing else uses the line then, and one connection is slow."""
    count = max(1, size_bytes // (PART_BYTES // 4))
    step = -(-size_bytes // count)
    return [(start, min(step, size_bytes - start)) for start in range(0, size_bytes, step)]


def part_elements(*, block: int, block_bytes: int) -> int:
    """Return the elements of every part of :func:`part_spans` but the last."""
    return block * max(1, PART_BYTES // max(1, block_bytes))
