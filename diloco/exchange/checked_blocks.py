"""Encoded blocks of a fragment, each followed by its checksum.

Payloads and the residuals of low-bit means have this layout::

   block 0, checksum, block 1, checksum, ...

So any range of whole blocks can be verified without another request, and records and plans do not
grow with the model. A checksum is the xxh3_64 of the encoded block (8 bytes, big-endian; against
damage, not against attacks). It starts from a ``seed`` and the number of the block, so a block of
another payload, or from another place, does not pass.

Errors: :class:`BadPayload` with the expected and found values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from diloco.codecs import Codec
from diloco.protocol.blocks import Span, block_elements
from diloco.protocol.payload_size import CHECKSUM_BYTES

SEEDS = 2**64


class BadPayload(ValueError):
    """A payload is truncated, damaged, or not the one in the plan."""


def checksum(data: bytes | bytearray | memoryview, seed: int = 0) -> str:
    """Return the checksum of bytes: 16 hex digits."""
    return str(xxhash.xxh3_64_hexdigest(data, seed))


def raw(body: Tensor) -> memoryview:
    """Return the bytes of a 1-d uint8 CPU tensor without a copy."""
    return memoryview(body.contiguous().numpy()).cast("B")  # type: ignore[arg-type]


@dataclass(frozen=True)
class CheckedBlocks:
    """The layout of the encoded blocks of a fragment of ``numel`` elements.

    Spans are elements of the fragment and begin at a block boundary.
    """

    codec: Codec
    numel: int
    seed: int = 0

    def size_bytes(self, numel: int) -> int:
        """Return the size of ``numel`` elements from a block boundary on."""
        blocks = -(-numel // block_elements(self.numel))
        return self.codec.encoded_bytes(numel) + CHECKSUM_BYTES * blocks

    def encode(self, vector: Tensor, span: Span, out: Tensor) -> tuple[list[Tensor], str]:
        """Encode the elements ``span`` into ``out``, uint8 of their size; return the encoded
        blocks, which are views of it, and their checksums in hex."""
        bodies, checksums = [], ""
        for where, start, stop in self._blocks(span):
            body = out[start:stop]
            self.codec.encode(vector[where.start - span.start : where.stop - span.start], body)
            found = self._checksum(raw(body), where)
            raw(out)[stop : stop + CHECKSUM_BYTES] = found
            bodies.append(body)
            checksums += found.hex()
        return bodies, checksums

    def decode(self, data: bytes | bytearray | memoryview, span: Span) -> Tensor:
        """Verify and decode the bytes of ``span`` to (span,) fp32, which can share their memory and
        must not be modified. Raises :class:`BadPayload`."""
        self.check(data, span)
        view = memoryview(data)
        bodies = [_tensor_of(view[start:stop]) for _, start, stop in self._blocks(span)]
        try:
            return self.decode_bodies(bodies, span.numel)
        except ValueError as error:
            raise BadPayload(str(error)) from None

    def check(self, data: bytes | bytearray | memoryview, span: Span) -> None:
        """Raise :class:`BadPayload` unless the bytes of ``span`` have their size and checksums."""
        size_bytes, view = self.size_bytes(span.numel), memoryview(data)
        if len(view) != size_bytes:
            raise BadPayload(
                f"expected {size_bytes} bytes of elements {span.start} to {span.stop}, "
                f"found {len(view)}"
            )
        for where, start, stop in self._blocks(span):
            expected = view[stop : stop + CHECKSUM_BYTES]
            found = self._checksum(view[start:stop], where)
            if found != expected:
                number = where.start // block_elements(self.numel)
                raise BadPayload(
                    f"expected checksum {expected.hex()} of block {number}, found {found.hex()}"
                )

    def decode_bodies(self, bodies: Sequence[Tensor], numel: int) -> Tensor:
        """Decode encoded blocks to one vector (numel,) fp32. A single block is not copied."""
        if len(bodies) == 1:
            return self.codec.decode(bodies[0], numel)
        vector = torch.empty(numel, dtype=torch.float32)
        for body, values in zip(
            bodies, torch.split(vector, block_elements(self.numel)), strict=bool(numel)
        ):
            self.codec.decode(body, values.numel(), values)
        return vector

    def _blocks(self, span: Span) -> Iterator[tuple[Span, int, int]]:
        """Yield each block of ``span`` and where its body begins and ends in the bytes."""
        block, position = block_elements(self.numel), 0
        for start in range(span.start, span.stop, block):
            where = Span(start, min(span.stop, start + block))
            stop = position + self.codec.encoded_bytes(where.numel)
            yield where, position, stop
            position = stop + CHECKSUM_BYTES

    def _checksum(self, body: memoryview, where: Span) -> bytes:
        seed = (self.seed + where.start // block_elements(self.numel)) % SEEDS
        return bytes.fromhex(checksum(body, seed))


def decode_body(
    data: bytes | bytearray | memoryview, numel: int, codec: Codec, out: Tensor | None = None
) -> Tensor:
    """Decode a body without checksums to (numel,) fp32, written to ``out`` if it is given. Without
    ``out`` the vector can share the memory of ``data`` and must not be modified. Raises
    :class:`BadPayload`."""
    if not numel and not data:
        return torch.empty(0, dtype=torch.float32)
    if not data:
        raise BadPayload(f"expected {numel} elements, found no bytes")
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
    return torch.frombuffer(buffer, dtype=torch.uint8)
