"""What a codec is, and the walk over chunks that the quantising ones share."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from diloco.protocol.payload_size import CODEC_SHAPES, payload_bytes

assert sys.byteorder == "little", "payloads are little-endian and read without conversion"

ALIGNMENT = 4096
"""Elements. A multiple of every codec's chunk: slices between multiples of it stand alone."""

CPU_STEP = 2**18
"""Elements worked on at a time: the temporaries stay in the cache, and the calls cost little."""
GPU_STEP = 2**24
"""The same on a GPU, where few launches count and the temporaries must stay bounded."""


class Codec(Protocol):
    """Vectors are 1-d fp32, bodies 1-d uint8 on the same device.

    For a and b multiples of :data:`ALIGNMENT`, ``encode(v[a:b])`` is ``encode(v)`` from
    ``encoded_bytes(a)`` to ``encoded_bytes(b)``. The same body decodes to the same bits on every
    CPU, whatever its vector width and number of threads.

    Nothing here raises on NaN or infinity, and nothing hides them: they decode to non-finite values
    (of the whole chunk, where there is a scale). Whoever sums must look.
    """

    name: str
    chunk: int
    """Granularity, elements: slices between multiples of it stand alone."""

    def encoded_bytes(self, numel: int) -> int:
        """Size of the body for a vector of ``numel`` elements, bytes."""
        ...

    def encode(self, vector: Tensor) -> Tensor:
        """The body of a vector. The vector is left unchanged, but the body may share its memory."""
        ...

    def decode(self, body: Tensor, numel: int) -> Tensor:
        """The vector of ``numel`` elements; it may share the body's memory. Raises
        :class:`ValueError` on a body that no :meth:`encode` made."""
        ...


def check_vector(vector: Tensor) -> None:
    if vector.dtype != torch.float32 or vector.dim() != 1:
        raise ValueError(
            f"expected a 1-d float32 vector, found {vector.dtype} of shape {tuple(vector.shape)}"
        )


def check_body(body: Tensor, *, size_bytes: int) -> None:
    if body.dtype != torch.uint8 or body.shape != (size_bytes,):
        raise ValueError(
            f"expected a body of {size_bytes} bytes, found {body.dtype} of shape "
            f"{tuple(body.shape)}"
        )


def copy_as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of some columns of a body, (n, m) uint8, read as ``dtype``: wherever they started,
    the copy is aligned."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


class ChunkedCodec(ABC):
    """Encodes row by row; a row is a chunk, and the last may be short."""

    name: str

    def __init__(self) -> None:
        self.chunk = CODEC_SHAPES[self.name].chunk

    def encoded_bytes(self, numel: int) -> int:
        return payload_bytes(numel, self.name)

    @abstractmethod
    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        """Encode (n, m) fp32 into (n, encoded_bytes(m)) uint8."""

    @abstractmethod
    def decode_rows(self, body: Tensor, out: Tensor) -> None:
        """Decode (n, encoded_bytes(m)) uint8 into (n, m) fp32."""

    @torch.no_grad()
    def encode(self, vector: Tensor) -> Tensor:
        check_vector(vector)
        size_bytes = self.encoded_bytes(vector.numel())
        body = torch.empty(size_bytes, dtype=torch.uint8, device=vector.device)
        for start, stop, width in self._pieces(vector):
            rows = vector[start:stop].contiguous().view(-1, width)
            self.encode_rows(rows, self._rows_of(body, start, stop, width))
        return body

    @torch.no_grad()
    def decode(self, body: Tensor, numel: int) -> Tensor:
        check_body(body, size_bytes=self.encoded_bytes(numel))
        body = body.contiguous()
        vector = torch.empty(numel, dtype=torch.float32, device=body.device)
        for start, stop, width in self._pieces(vector):
            rows = vector[start:stop].view(-1, width)
            self.decode_rows(self._rows_of(body, start, stop, width), rows)
        return vector

    def _rows_of(self, body: Tensor, start: int, stop: int, width: int) -> Tensor:
        piece = body[self.encoded_bytes(start) : self.encoded_bytes(stop)]
        return piece.view(-1, self.encoded_bytes(width))

    def _pieces(self, vector: Tensor) -> list[tuple[int, int, int]]:
        """(start, stop, row width) of cache-sized runs of whole chunks, then of the short one."""
        numel = vector.numel()
        step = CPU_STEP if vector.device.type == "cpu" else GPU_STEP
        whole = numel - numel % self.chunk
        pieces = [(start, min(start + step, whole), self.chunk) for start in range(0, whole, step)]
        if whole < numel:
            pieces.append((whole, numel, numel - whole))
        return pieces
