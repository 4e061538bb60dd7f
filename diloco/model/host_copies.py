"""Copies between tensors of a model and vectors on the CPU, a few megabytes at a time.

Between a GPU and the host they pass through two pinned buffers in turn: while one is filled or read
by the CPU, the other is being transferred. So no pinned memory of a fragment's size is needed,
which torch's allocator would round up to a power of two, and no copy waits for other streams than
the caller's. Values are converted where they are written, one rounding to nearest even.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.model.fragments import Slot

CHUNK = 2**22
"""Elements that are copied at a time."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements of a tensor, ``values`` (n,), and their position in a vector of held elements."""

    slot: Slot
    values: Tensor
    at: int


@dataclass(frozen=True, kw_only=True)
class HostChunk:
    """At most :data:`CHUNK` elements of a piece, ``values`` (n,) fp32 on the CPU, which the reader
    may change, and their place in the vector of held elements."""

    slot: Slot
    values: Tensor
    where: slice


def chunks_on_host(pieces: Iterable[Piece], *, numel: int) -> Iterator[HostChunk]:
    """Yield ``pieces`` of together ``numel`` elements as fp32 on the CPU. A chunk's memory is used
    again after the next one was requested."""
    buffers = _Buffers(min(CHUNK, numel), torch.float32)
    started: tuple[HostChunk, torch.cuda.Event] | None = None
    for piece in pieces:
        for start in range(0, piece.values.numel(), CHUNK):
            values = piece.values[start : start + CHUNK]
            buffer = buffers.next(values.device)[: values.numel()]
            chunk = HostChunk(
                slot=piece.slot,
                values=buffer,
                where=slice(piece.at + start, piece.at + start + values.numel()),
            )
            if not values.is_cuda:
                buffer.copy_(values)
                yield chunk
                continue
            buffer.copy_(values.float(), non_blocking=True)
            if started is not None:
                yield _arrived(*started)
            started = chunk, buffers.mark(values.device)
    if started is not None:
        yield _arrived(*started)


def _arrived(chunk: HostChunk, copied: torch.cuda.Event) -> HostChunk:
    copied.synchronize()
    return chunk


def copy_from_host(target: Tensor, values: Tensor) -> None:
    """Copy ``values`` (target's shape, on the CPU) into a tensor of any device and dtype. On a GPU
    the last transfers can still be under way, on the caller's stream."""
    if not target.is_cuda or values.is_cuda or not target.is_contiguous():
        target.copy_(values)
        return
    into, source = target.view(-1), values.reshape(-1)
    buffers = _Buffers(min(CHUNK, source.numel()), target.dtype)
    for start in range(0, source.numel(), CHUNK):
        part = source[start : start + CHUNK]
        buffer = buffers.next(target.device)[: part.numel()]
        buffer.copy_(part)
        into[start : start + part.numel()].copy_(buffer, non_blocking=True)
        buffers.mark(target.device)


class _Buffers:
    """Two buffers in turn, pinned if they are for a GPU; a single one otherwise."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._numel = numel
        self._dtype = dtype
        self._buffers: list[Tensor] = []
        self._used: list[torch.cuda.Event | None] = [None, None]
        self._current = 1

    def next(self, device: torch.device) -> Tensor:
        """Return the buffer whose transfer is the older, once it has ended."""
        on_gpu = device.type == "cuda"
        count = 2 if on_gpu else 1
        while len(self._buffers) < count:
            self._buffers.append(torch.empty(self._numel, dtype=self._dtype, pin_memory=on_gpu))
        self._current = (self._current + 1) % count
        used = self._used[self._current]
        if used is not None:
            used.synchronize()
        return self._buffers[self._current]

    def mark(self, device: torch.device) -> torch.cuda.Event:
        """Record the transfers of the current buffer, which the caller's stream has received."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._used[self._current] = event
        return event
