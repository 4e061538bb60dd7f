"""Payload format: a fixed header, then raw tensor bytes. Nothing is ever unpickled (I7).

::

    8 bytes    magic "ARCHIPL2"
    248 bytes  JSON of a PayloadInfo, padded with spaces
    body       codec output, block after block

The header follows from what a plan says of a contribution, so a reader computes it instead of
reading it, and any byte range of the body can be asked for at once. Each block of the body has a
checksum (the low 32 bits of xxh3_64, which is against damage, not malice). The checksums travel in
the contribution's record and in the plan, so that a payload can be encoded, checked and uploaded
in one pass, and a slice of it verified without reading the rest. A payload's *digest*, the sha256
of header and checksums, pins every byte.

Errors: :class:`BadPayload` says what was expected and found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import xxhash
from torch import Tensor

from diloco.clock import Clock
from diloco.codecs import Codec
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import sum_of_squares
from diloco.protocol.blocks import HEADER_BYTES, Span, block_elements
from diloco.store.base import PART_BYTES

MAGIC = b"ARCHIPL2"
CHECKSUM_DIGITS = 8
SLICE = 2**18
"""Elements encoded, or decoded and summed, at a time: they stay in a core's cache."""


KEPT_SHARE = 32
"""A payload that is smaller than its vector by this factor is kept by who made it."""


class BadPayload(ValueError):
    """A payload is truncated, damaged, or not the one the plan names."""


@dataclass(frozen=True, kw_only=True)
class PayloadInfo:
    """Who made a payload and what it holds; ``numel`` is of the fragment."""

    round: int
    fragment: int
    replica: int
    incarnation: str
    codec: str
    numel: int


def header(info: PayloadInfo) -> bytes:
    """The :data:`HEADER_BYTES` that stand before the body."""
    text = json.dumps(asdict(info), separators=(",", ":")).encode()
    assert len(MAGIC) + len(text) <= HEADER_BYTES, text
    return (MAGIC + text).ljust(HEADER_BYTES)


def digest_of(info: PayloadInfo, checksums: str) -> str:
    """sha256, hex, of header and checksums."""
    return hashlib.sha256(header(info) + checksums.encode()).hexdigest()


def checksum(data: bytes | bytearray | memoryview) -> str:
    return f"{xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF:08x}"


def raw(body: Tensor) -> memoryview:
    """The bytes of a 1-d uint8 CPU tensor, without a copy."""
    return memoryview(body.contiguous().numpy()).cast("B")  # type: ignore[arg-type]


class Packing:
    """One contribution on its way out: encodes ``vector`` slice by slice into parts of an upload.

    ``vector`` (numel,) fp32 on the CPU is left unchanged; ``slots`` are the fragment's tensors.
    When :meth:`parts` has been exhausted, ``checksums``, ``norms`` (of the decoded tensors),
    ``norm`` (of all of them) and ``encode_s`` are known, and ``body`` if it is small: encoding
    costs more than keeping it then. It may be called again for another try.
    """

    def __init__(
        self,
        info: PayloadInfo,
        vector: Tensor,
        codec: Codec,
        slots: Sequence[Slot],
        *,
        clock: Clock,
    ) -> None:
        assert vector.numel() == info.numel
        self.info = info
        self.size_bytes = HEADER_BYTES + codec.encoded_bytes(info.numel)
        self.checksums = ""
        self.norms: tuple[float, ...] = ()
        self.body: Tensor | None = None
        self._vector = vector
        self._codec = codec
        self._slots = slots
        self._clock = clock
        self.encode_s = 0.0

    @property
    def norm(self) -> float:
        return float(sum(norm * norm for norm in self.norms) ** 0.5)

    @property
    def digest(self) -> str:
        return digest_of(self.info, self.checksums)

    def parts(self) -> Iterator[memoryview]:
        """The object, in pieces of :data:`PART_BYTES`, each in memory of its own."""
        part, filled, left = _new_part(self.size_bytes), 0, self.size_bytes
        for piece in self._pieces():
            taken = 0
            while taken < len(piece):
                count = min(len(piece) - taken, len(part) - filled)
                part[filled : filled + count] = piece[taken : taken + count]
                taken, filled = taken + count, filled + count
                if filled == len(part):
                    yield part
                    left -= filled
                    part, filled = _new_part(left), 0
        assert left == 0, "the codec said how many bytes it would make"

    def _pieces(self) -> Iterator[bytes | memoryview]:
        squares = [0.0] * len(self._slots)
        checksums: list[str] = []
        is_small = self._codec.encoded_bytes(self.info.numel) * KEPT_SHARE < 4 * self.info.numel
        kept: list[Tensor] = []
        block = block_elements(self.info.numel)
        first = self._slots[0].offset
        yield header(self.info)
        block_bytes = self._codec.encoded_bytes(block)
        for where in slices(Span(0, self.info.numel), self.info.numel):
            started_s = self._clock.monotonic()
            body = self._codec.encode(self._vector[where.start : where.stop])
            piece = raw(body)
            if is_small:
                kept.append(body)
            checksums += [
                checksum(piece[offset : offset + block_bytes])
                for offset in range(0, len(piece), block_bytes)
            ]
            decoded = self._codec.decode(body, where.numel)
            for index, span in overlaps(self._slots, first, where.start, where.numel):
                tensor = decoded[span.start - where.start : span.stop - where.start]
                squares[index] += sum_of_squares(tensor)
            self.encode_s += self._clock.monotonic() - started_s
            yield piece
        self.checksums = "".join(checksums)
        self.norms = tuple(square**0.5 for square in squares)
        self.body = torch.cat(kept) if kept else None


def slices(span: Span, numel: int) -> Iterator[Span]:
    """A run of whole blocks of a fragment of ``numel``, cut into runs of about :data:`SLICE`."""
    step = max(SLICE, block_elements(numel))
    for start in range(span.start, span.stop, step):
        yield Span(start, min(span.stop, start + step))


def overlaps(
    slots: Sequence[Slot], first: int, start: int, numel: int
) -> Iterator[tuple[int, Span]]:
    """(index, elements) of every tensor that reaches into ``start`` to ``start + numel``, which
    count from ``first``, the fragment's place in the whole vector."""
    for index, slot in enumerate(slots):
        low, high = max(slot.offset - first, start), min(slot.stop - first, start + numel)
        if low < high:
            yield index, Span(low, high)


def check_part(
    data: bytes | bytearray | memoryview, span: Span, codec: Codec, *, numel: int, checksums: str
) -> None:
    """Check the bytes of ``span`` (whole blocks of a fragment of ``numel``) against the payload's
    checksums. Raises :class:`BadPayload`."""
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
    """The elements of ``span`` (whole blocks of a fragment of ``numel``), fp32, from the bytes of
    their part of the body. Raises :class:`BadPayload`."""
    check_part(data, span, codec, numel=numel, checksums=checksums)
    return decode_body(data, span.numel, codec)


def decode_body(data: bytes | bytearray | memoryview, numel: int, codec: Codec) -> Tensor:
    """An encoded body as (numel,) fp32. Raises :class:`BadPayload`."""
    if not data:
        return torch.empty(0, dtype=torch.float32)
    writable = data if isinstance(data, bytearray) else bytearray(data)
    try:
        return codec.decode(torch.frombuffer(writable, dtype=torch.uint8), numel)
    except ValueError as error:
        raise BadPayload(str(error)) from None


def _new_part(left: int) -> memoryview:
    return raw(torch.empty(min(left, PART_BYTES), dtype=torch.uint8))
