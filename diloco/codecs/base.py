"""The codec protocol, and the base class of the codecs that work in chunks."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from diloco.protocol.payload_size import CODEC_SHAPES, payload_bytes

assert sys.byteorder == "little", "payloads are little-endian and read without conversion"

ALIGNMENT = 4096
"""Elements; a multiple of every codec's chunk. Slices between multiples of it can be encoded
separately."""

CPU_STEP = 2**18
"""Elements per step on a CPU: temporaries stay in the cache, and the overhead of calls is small."""
GPU_STEP = 2**24
"""Elements per step on a GPU, where few kernel launches matter and temporaries must be bounded."""


class Codec(Protocol):
    """Converts vectors (1-d fp32) to bodies (1-d uint8 on the same device) and back.

    For a and b multiples of :data:`ALIGNMENT`, ``encode(v[a:b])`` equals bytes ``encoded_bytes(a)``
    to ``encoded_bytes(b)`` of ``encode(v)``. A body decodes to the same bits on every CPU,
    independent of its vector width and the number of threads.

    No method raises on NaN or infinity or hides them: they decode to non-finite values (of the
    whole chunk, if it has a scale). The caller must check before summing.
    """

    name: str
    chunk: int
    """Granularity in elements: slices between multiples of it can be encoded separately."""

    def encoded_bytes(self, numel: int) -> int:
        """Return the size in bytes of the body of ``numel`` elements."""
        ...

    def encode(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the body of a vector, which is not modified. The body is written to ``out``, 1-d
        uint8 of its size; without ``out`` it can share the vector's memory."""
        ...

    def decode(self, body: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """Return the vector of ``numel`` elements. It is written to ``out``, (numel,) fp32; without
        ``out`` it can share the body's memory. Raises :class:`ValueError` for a body that
        :meth:`encode` cannot produce."""
        ...


def check_vector(vector: Tensor) -> None:
    """Raise :class:`ValueError` unless ``vector`` is 1-d fp32."""
    if vector.dtype != torch.float32 or vector.dim() != 1:
        raise ValueError(
            f"expected a 1-d float32 vector, found {vector.dtype} of shape {tuple(vector.shape)}"
        )


def check_body(body: Tensor, *, size_bytes: int) -> None:
    """Raise :class:`ValueError` unless ``body`` is 1-d uint8 with ``size_bytes`` elements."""
    if body.dtype != torch.uint8 or body.shape != (size_bytes,):
        raise ValueError(
            f"expected a body of {size_bytes} bytes, found {body.dtype} of shape "
            f"{tuple(body.shape)}"
        )


def copy_as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an aligned copy of some columns of a body, (n, m) uint8, viewed as ``dtype``."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


class ChunkedCodec(ABC):
    """Encodes row by row; a row is a chunk, and the last one can be short."""

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
    def encode(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        check_vector(vector)
        size_bytes = self.encoded_bytes(vector.numel())
        if out is not None:
            check_body(out, size_bytes=size_bytes)
        else:
            out = torch.empty(size_bytes, dtype=torch.uint8, device=vector.device)
        for start, stop, width in self._pieces(vector):
            rows = vector[start:stop].contiguous().view(-1, width)
            self.encode_rows(rows, self._rows_of(out, start, stop, width))
        return out

    @torch.no_grad()
    def decode(self, body: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        check_body(body, size_bytes=self.encoded_bytes(numel))
        body = body.contiguous()
        vector = torch.empty(numel, dtype=torch.float32, device=body.device) if out is None else out
        for start, stop, width in self._pieces(vector):
            rows = vector[start:stop].view(-1, width)
            self.decode_rows(self._rows_of(body, start, stop, width), rows)
        return vector

    def _rows_of(self, body: Tensor, start: int, stop: int, width: int) -> Tensor:
        piece = body[self.encoded_bytes(start) : self.encoded_bytes(stop)]
        return piece.view(-1, self.encoded_bytes(width))

    def _pieces(self, vector: Tensor) -> list[tuple[int, int, int]]:
        """Return (start, stop, row width) of cache-sized runs of whole chunks, then of the short
        one."""
        numel = vector.numel()
        step = CPU_STEP if vector.device.type == "cpu" else GPU_STEP
        whole = numel - numel % self.chunk
        pieces = [(start, min(start + step, whole), self.chunk) for start in range(0, whole, step)]
        if whole < numel:
            pieces.append((whole, numel, numel - whole))
        return pieces
