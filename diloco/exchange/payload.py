"""Payload format: a fixed header, then raw tensor bytes. Nothing is ever unpickled (invariant I7).

::

   8 bytes    magic "ARCHIPL2"
   248 bytes  JSON of a PayloadInfo, padded with spaces
   body       codec output, block after block

A payload of a replica of several ranks can be divided into objects, one per *slice* of the fragment
(:func:`~diloco.protocol.blocks.slice_spans`). Joined, they are the same bytes.

The header follows from the plan, so a reader computes it instead of reading it and can request any
byte range of the body at once. Each block of the body has a checksum (the low 32 bits of xxh3_64,
against damage, not against attacks). The checksums are stored in the contribution's record and in
the plan. A payload can therefore be encoded, checked and uploaded in one pass, and a slice can be
verified without the rest. A payload's *digest*, the sha256 of header and checksums, identifies its
content.

Errors: :class:`BadPayload` with the expected and found values.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from diloco.clock import Clock
from diloco.codecs import Codec
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import fast_sum_of_squares, sum_of_squares
from diloco.protocol.blocks import HEADER_BYTES, Span, block_elements, slice_spans
from diloco.protocol.payload_size import CHECKSUM_DIGITS
from diloco.store.base import PART_BYTES

MAGIC = b"ARCHIPL2"
U8 = torch.uint8
SLICE = 2**18
"""Elements encoded, or decoded and summed, at a time; a slice fits into a core's cache."""
KEPT_SHARE = 32
"""The writer keeps a payload that is smaller than its vector by at least this factor."""


class BadPayload(ValueError):
    """A payload is truncated, damaged, or not the one in the plan."""


@dataclass(frozen=True, kw_only=True)
class PayloadInfo:
    """Identity and codec of a payload; ``numel`` is the size of the fragment."""

    round: int
    fragment: int
    replica: int
    incarnation: str
    codec: str
    numel: int


def header(info: PayloadInfo) -> bytes:
    """Return the :data:`HEADER_BYTES` before the body."""
    text = json.dumps(asdict(info), separators=(",", ":")).encode()
    assert len(MAGIC) + len(text) <= HEADER_BYTES, text
    return (MAGIC + text).ljust(HEADER_BYTES)


def digest_of(info: PayloadInfo, checksums: str) -> str:
    """Return the hex sha256 of header and checksums."""
    return hashlib.sha256(header(info) + checksums.encode()).hexdigest()


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of a block: 8 hex digits."""
    return f"{xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF:08x}"


def raw(body: Tensor) -> memoryview:
    """Return the bytes of a 1-d uint8 CPU tensor without a copy."""
    return memoryview(body.contiguous().numpy()).cast("B")  # type: ignore[arg-type]


def object_range(info_numel: int, slices: int, span: Span, codec: Codec) -> tuple[int, int]:
    """Return the slice that contains ``span`` of a payload and the position of its first byte in
    that slice's object. Raises :class:`BadPayload` if no slice contains it."""
    for index, held in enumerate(slice_spans(info_numel, slices)):
        if held.start <= span.start and span.stop <= held.stop and held.numel:
            header_bytes = HEADER_BYTES if held.start == 0 else 0
            return index, header_bytes + codec.encoded_bytes(span.start - held.start)
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
        self.size_bytes = len(self.header) + codec.encoded_bytes(self.span.numel)
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
        content = _Content(self._codec.encoded_bytes(block_elements(self.info.numel)))
        is_small = self._codec.encoded_bytes(self.info.numel) * KEPT_SHARE < 4 * self.info.numel
        if self.header:
            parts.room(len(self.header)).copy_(torch.frombuffer(bytearray(self.header), dtype=U8))
            yield from parts.filled()
        offset = self.span.start
        for where in slices(self.span, self.info.numel):
            started_s = self._clock.monotonic()
            body = parts.room(self._codec.encoded_bytes(where.numel))
            self._codec.encode(self._vector[where.start - offset : where.stop - offset], body)
            self._count(content, where, body)
            if is_small:
                content.kept.append(body.clone())
            self.encode_s += self._clock.monotonic() - started_s
            yield from parts.filled()
        self.checksums = "".join(content.checksums)
        self.squares = content.squares
        self.body = torch.cat(content.kept) if content.kept else None

    def _count(self, content: _Content, where: Span, body: Tensor) -> None:
        """Add the checksums and sums of squares of the elements ``where``."""
        piece = raw(body)
        content.checksums += [
            checksum(piece[offset : offset + content.block_bytes])
            for offset in range(0, len(piece), content.block_bytes)
        ]
        decoded = self._codec.decode(body, where.numel)
        first = self._slots[0].offset
        for index, span in overlaps(self._slots, first, where.start, where.numel):
            tensor = decoded[span.start - where.start : span.stop - where.start]
            content.squares.append((index, self._squares_of(tensor)))


@dataclass
class _Content:
    """Checksums and sums of squares of the payload that is being encoded."""

    block_bytes: int
    checksums: list[str] = field(default_factory=list)
    squares: list[tuple[int, float]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


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


def check_part(
    data: bytes | bytearray | memoryview, span: Span, codec: Codec, *, numel: int, checksums: str
) -> None:
    """Check the bytes of ``span`` (whole blocks of a fragment of ``numel`` elements) against the
    payload's checksums. Raises :class:`BadPayload`."""
    size_bytes = codec.encoded_bytes(span.numel)
    if len(data) != size_bytes:
        raise BadPayload(
            f"expected {size_bytes} bytes of elements {span.start} to {span.stop}, "
            f"found {len(data)}"
        )
    block = block_elements(numel)
    view = memoryview(data)
    offset = 0
    for start in range(span.start, span.stop, block):
        size = codec.encoded_bytes(min(block, span.stop - start))
        index = start // block
        expected = checksums[index * CHECKSUM_DIGITS : (index + 1) * CHECKSUM_DIGITS]
        found = checksum(view[offset : offset + size])
        if found != expected:
            raise BadPayload(f"expected checksum {expected} of block {index}, found {found}")
        offset += size


def decode_part(
    data: bytes | bytearray | memoryview, span: Span, codec: Codec, *, numel: int, checksums: str
) -> Tensor:
    """Verify and decode the bytes of ``span`` (whole blocks of a fragment of ``numel`` elements) to
    (span,) fp32. Raises :class:`BadPayload`."""
    check_part(data, span, codec, numel=numel, checksums=checksums)
    return decode_body(data, span.numel, codec)


def decode_body(
    data: bytes | bytearray | memoryview, numel: int, codec: Codec, out: Tensor | None = None
) -> Tensor:
    """Decode a body to (numel,) fp32, written to ``out`` if it is given. Without ``out`` the vector
    can share the memory of ``data`` and must not be modified. Raises :class:`BadPayload`."""
    if not data:
        return torch.empty(0, dtype=torch.float32)
    try:
        return codec.decode(_tensor_of(data), numel, out)
    except ValueError as error:
        raise BadPayload(str(error)) from None


def _tensor_of(data: bytes | bytearray | memoryview) -> Tensor:
    """View bytes as a 1-d uint8 tensor, which must not be written. torch warns of a read-only
    buffer, so it gets the address."""
    source = np.frombuffer(data, dtype=np.uint8)
    buffer: Any = (ctypes.c_uint8 * source.size).from_address(source.ctypes.data)
    buffer.source = source  # keeps the memory
    return torch.frombuffer(buffer, dtype=U8)
