"""Payload format: a fixed header, then raw tensor bytes. Nothing is ever unpickled (invariant I7).

::

   8 bytes    magic "ARCHIPL2"
   248 bytes  JSON of a PayloadInfo, padded with spaces
   body       codec output, block after block, each with its checksum

A payload of a replica of several ranks can be divided into objects, one per *slice* of the fragment
(:func:`~diloco.protocol.blocks.slice_spans`). Joined, they are the same bytes.

The header follows from the plan, so a reader computes it instead of reading it and can request any
byte range of the body at once. The checksums (:mod:`diloco.exchange.checked_blocks`) start from a
hash of the header, which has the number of the attempt: a plan fixes which payload its readers
accept, block by block. A payload can be encoded, checked and uploaded in one pass, and a slice can
be verified without the rest. A payload's *digest*, the sha256 of header and checksums, identifies
its content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch
import xxhash
from torch import Tensor

from diloco.clock import Clock
from diloco.codecs import Codec
from diloco.exchange.checked_blocks import BadPayload, CheckedBlocks, raw
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import fast_sum_of_squares, sum_of_squares
from diloco.protocol.blocks import HEADER_BYTES, Span, block_elements, slice_spans
from diloco.store.base import PART_BYTES

MAGIC = b"ARCHIPL2"
U8 = torch.uint8
SLICE = 2**18
"""Elements encoded, or decoded and summed, at a time; a slice fits into a core's cache."""
KEPT_SHARE = 6
"""The writer keeps a payload that is smaller than its vector by at least this factor (E3M0 and
top-k), so that the sum of the round and the cosine do not encode the vector again."""


@dataclass(frozen=True, kw_only=True)
class PayloadInfo:
    """Identity and codec of a payload; ``numel`` is the size of the fragment.

    ``attempt`` counts the contributions of the process, so that two payloads of one round differ:
    a process that restarts from a checkpoint can contribute to a round again.
    """

    round: int
    fragment: int
    replica: int
    incarnation: str
    codec: str
    numel: int
    attempt: int = 1


def header(info: PayloadInfo) -> bytes:
    """Return the :data:`HEADER_BYTES` before the body."""
    text = json.dumps(asdict(info), separators=(",", ":")).encode()
    assert len(MAGIC) + len(text) <= HEADER_BYTES, text
    return (MAGIC + text).ljust(HEADER_BYTES)


def digest_of(info: PayloadInfo, checksums: str) -> str:
    """Return the hex sha256 of header and checksums."""
    return hashlib.sha256(header(info) + checksums.encode()).hexdigest()


def blocks_of(info: PayloadInfo, codec: Codec) -> CheckedBlocks:
    """Return the layout of a payload's body."""
    return CheckedBlocks(codec, info.numel, xxhash.xxh3_64_intdigest(header(info)))


def object_range(blocks: CheckedBlocks, slices: int, span: Span) -> tuple[int, int]:
    """Return the slice that contains ``span`` of a payload and the position of its first byte in
    that slice's object. Raises :class:`BadPayload` if no slice contains it."""
    for index, held in enumerate(slice_spans(blocks.numel, slices)):
        if held.start <= span.start and span.stop <= held.stop and held.numel:
            header_bytes = HEADER_BYTES if held.start == 0 else 0
            return index, header_bytes + blocks.size_bytes(span.start - held.start)
    raise BadPayload(f"expected elements {span.start} to {span.stop} in one of {slices} slices")


def norms_of(squares: Iterable[tuple[int, float]], tensors: int) -> tuple[float, ...]:
    """Return the norm of each tensor from the sums of squares of its pieces, in their order."""
    totals = [0.0] * tensors
    for index, square in squares:
        totals[index] += square
    return tuple(total**0.5 for total in totals)


class PayloadWriter:
    """Encodes one contribution, or a slice of it, piece by piece into the parts of an upload.

    ``vector`` (span,) fp32 on the CPU, the elements ``span`` of the fragment or all, is not
    modified; ``slots`` are the fragment's tensors. With ``exact_norms`` the norms have the same
    bits on every CPU, which RDA needs; otherwise they are about ten times as fast. After
    :meth:`parts` is exhausted, these are set: ``checksums``, ``squares`` (index and sum of squares
    of each piece of a decoded tensor), ``norms`` (of the decoded tensors), ``norm`` (of all of
    them), ``encode_s``, and ``body`` if it is so small that keeping it costs less than encoding it
    again. :meth:`parts` can be called again for another attempt.
    """

    def __init__(
        self,
        info: PayloadInfo,
        vector: Tensor,
        codec: Codec,
        slots: Sequence[Slot],
        *,
        clock: Clock,
        exact_norms: bool = True,
        span: Span | None = None,
    ) -> None:
        self.span = span or Span(0, info.numel)
        assert vector.numel() == self.span.numel
        self.info = info
        self.header = b"" if self.span.start else header(info)
        self.blocks = blocks_of(info, codec)
        self.size_bytes = len(self.header) + self.blocks.size_bytes(self.span.numel)
        self.checksums = ""
        self.squares: list[tuple[int, float]] = []
        self.body: Tensor | None = None
        self._vector = vector
        self._codec = codec
        self._slots = slots
        self._clock = clock
        self._squares_of = sum_of_squares if exact_norms else fast_sum_of_squares
        self.encode_s = 0.0

    @property
    def norms(self) -> tuple[float, ...]:
        return norms_of(self.squares, len(self._slots))

    @property
    def norm(self) -> float:
        return float(sum(norm * norm for norm in self.norms) ** 0.5)

    @property
    def digest(self) -> str:
        return digest_of(self.info, self.checksums)

    def parts(self) -> Iterator[memoryview]:
        """Yield the object in parts of :data:`PART_BYTES`, each in separate memory."""
        parts = _PartBuffer(self.size_bytes)
        content = _Content()
        kept = self._kept_body()
        if self.header:
            parts.room(len(self.header)).copy_(torch.frombuffer(bytearray(self.header), dtype=U8))
            yield from parts.filled()
        offset = self.span.start
        for where in slices(self.span, self.info.numel):
            started_s = self._clock.monotonic()
            piece = self._vector[where.start - offset : where.stop - offset]
            body = parts.room(self.blocks.size_bytes(where.numel))
            bodies, checksums = self.blocks.encode(piece, where, body)
            content.checksums.append(checksums)
            self._count(content, where, self.blocks.decode_bodies(bodies, where.numel))
            if kept is not None:
                start = self._codec.encoded_bytes(where.start - offset)
                for body in bodies:
                    kept[start : start + body.numel()] = body
                    start += body.numel()
            self.encode_s += self._clock.monotonic() - started_s
            yield from parts.filled()
        self.checksums = "".join(content.checksums)
        self.squares = content.squares
        self.body = kept

    def _kept_body(self) -> Tensor | None:
        """Return memory for the body, if it is kept."""
        size_bytes = self._codec.encoded_bytes(self.span.numel)
        if size_bytes * KEPT_SHARE >= 4 * self.span.numel:
            return None
        return torch.empty(size_bytes, dtype=U8)

    def _count(self, content: _Content, where: Span, decoded: Tensor) -> None:
        """Add the sums of squares of the elements ``where``."""
        first = self._slots[0].offset
        for index, span in overlaps(self._slots, first, where.start, where.numel):
            tensor = decoded[span.start - where.start : span.stop - where.start]
            content.squares.append((index, self._squares_of(tensor)))


@dataclass
class _Content:
    """Checksums and sums of squares of the payload that is being encoded."""

    checksums: list[str] = field(default_factory=list)
    squares: list[tuple[int, float]] = field(default_factory=list)


class _PartBuffer:
    """Memory for an object of ``size_bytes`` in parts of :data:`PART_BYTES`. Pieces are written
    where they are sent from; only a piece that crosses parts is copied. A part is allocated when
    its first piece is."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._used = 0
        self._part = torch.empty(0, dtype=U8)
        self._crossing: Tensor | None = None

    def room(self, size_bytes: int) -> Tensor:
        """Return memory for the next piece, 1-d uint8. :meth:`filled` must follow."""
        self._allocate()
        end = self._used + size_bytes
        if end <= self._part.numel():
            room = self._part[self._used : end]
            self._used = end
            return room
        self._crossing = torch.empty(size_bytes, dtype=U8)
        return self._crossing

    def filled(self) -> Iterator[memoryview]:
        """Yield the parts that are complete."""
        rest, self._crossing = self._crossing, None
        while rest is not None and rest.numel():
            self._allocate()
            count = min(rest.numel(), self._part.numel() - self._used)
            self._part[self._used : self._used + count] = rest[:count]
            self._used, rest = self._used + count, rest[count:]
            if self._used == self._part.numel():
                yield self._taken()
        if self._used and self._used == self._part.numel():
            yield self._taken()

    def _allocate(self) -> None:
        if not self._part.numel():
            self._part = torch.empty(min(self._left, PART_BYTES), dtype=U8)

    def _taken(self) -> memoryview:
        part, self._part = raw(self._part), torch.empty(0, dtype=U8)
        self._left, self._used = self._left - self._used, 0
        return part


def slices(span: Span, numel: int) -> Iterator[Span]:
    """Divide a span of whole blocks, in a fragment of ``numel`` elements, into slices of about
    :data:`SLICE`."""
    step = max(SLICE, block_elements(numel))
    for start in range(span.start, span.stop, step):
        yield Span(start, min(span.stop, start + step))


def overlaps(
    slots: Sequence[Slot], first: int, start: int, numel: int
) -> Iterator[tuple[int, Span]]:
    """Yield (index, elements) of every tensor that overlaps ``start`` to ``start + numel``. These
    offsets are relative to ``first``, the fragment's offset in the whole vector."""
    for index, slot in enumerate(slots):
        low, high = max(slot.offset - first, start), min(slot.stop - first, start + numel)
        if low < high:
            yield index, Span(low, high)
