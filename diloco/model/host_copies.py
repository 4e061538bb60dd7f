"""Copies between tensors of a model and vectors on the CPU, a few megabytes at a time.

Between a GPU and the host they pass through two pinned buffers in turn: while the CPU fills or
reads one, the other is being transferred. So no pinned memory of a fragment's size is needed, which
torch's allocator would round up to a power of two, and no copy waits for other streams than the
caller's. Values are converted before they are transferred, with one rounding to nearest even.

Left out: tensors on a GPU that are not contiguous.
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
    """At most :data:`CHUNK` elements of a piece, ``values`` (n,) on the CPU, and their place in the
    vector of held elements."""

    slot: Slot
    values: Tensor
    where: slice


def chunks_on_host(
    pieces: Iterable[Piece], *, numel: int, changes: bool = True
) -> Iterator[HostChunk]:
    """Yield the elements of ``pieces``, in their order; they have ``numel`` elements together.

    The values are fp32 which the caller may change, and requesting the next chunk overwrites them.
    Without ``changes`` those of a tensor on the CPU are its own memory in its own dtype.
    """
    largest = min(CHUNK, numel)
    pinned = _PinnedBuffers(largest, torch.float32)
    scratch = torch.empty(largest if changes else 0, dtype=torch.float32)
    under_way: tuple[HostChunk, torch.cuda.Event] | None = None
    for piece in pieces:
        for start in range(0, piece.values.numel(), CHUNK):
            values = piece.values[start : start + CHUNK]
            where = slice(piece.at + start, piece.at + start + values.numel())
            before = under_way
            if values.is_cuda:
                host = pinned.next()[: values.numel()]
                host.copy_(values.float(), non_blocking=True)
                chunk = HostChunk(slot=piece.slot, values=host, where=where)
                under_way = chunk, pinned.mark(values.device)
            else:
                under_way = None
            if before is not None:
                yield _arrived(*before)
            if not values.is_cuda:
                host = scratch[: values.numel()].copy_(values) if changes else values
                yield HostChunk(slot=piece.slot, values=host, where=where)
    if under_way is not None:
        yield _arrived(*under_way)


def _arrived(chunk: HostChunk, copied: torch.cuda.Event) -> HostChunk:
    copied.synchronize()
    return chunk


def copy_from_host(target: Tensor, values: Tensor) -> None:
    """Copy ``values`` (target's shape, on any device) into a tensor of any device and dtype, and
    wait until they are there. Raises :class:`ValueError` for another shape."""
    if target.shape != values.shape:
        raise ValueError(
            f"expected values of the shape {tuple(target.shape)}, found {tuple(values.shape)}"
        )
    if not target.is_cuda or values.is_cuda or not target.is_contiguous():
        target.copy_(values)
        return
    into, source = target.view(-1), values.reshape(-1)
    buffers = _PinnedBuffers(min(CHUNK, source.numel()), target.dtype)
    for start in range(0, source.numel(), CHUNK):
        part = source[start : start + CHUNK]
        buffer = buffers.next()[: part.numel()]
        buffer.copy_(part)
        into[start : start + part.numel()].copy_(buffer, non_blocking=True)
        buffers.mark(target.device)
    buffers.wait()


class _PinnedBuffers:
    """Two pinned buffers in turn, each allocated when it is first needed."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._numel = numel
        self._dtype = dtype
        self._buffers: list[Tensor] = []
        self._used: dict[int, torch.cuda.Event] = {}
        self._current = 1

    def next(self) -> Tensor:
        """Return the other buffer, once its transfer has ended."""
        self._current = 1 - self._current
        if self._current == len(self._buffers):
            empty = torch.empty(self._numel, dtype=self._dtype, pin_memory=True)
            self._buffers.append(empty)
        if self._current in self._used:
            self._used[self._current].synchronize()
        return self._buffers[self._current]

    def mark(self, device: torch.device) -> torch.cuda.Event:
        """Record the transfer of the current buffer, which the caller's stream has received."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._used[self._current] = event
        return event

    def wait(self) -> None:
        """Wait for all transfers."""
        for event in self._used.values():
            event.synchronize()
