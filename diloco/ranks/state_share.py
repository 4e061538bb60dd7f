"""One rank's share of the saved state of a replica of several ranks.

The optimizer state of a model is whole on every rank (DistributedDataParallel) or divided over them
(FSDP2). It is copied tensor by tensor, which all ranks do together, and each rank keeps the bytes
of its share of the object: no rank has all of it. The residuals of error feedback are slices, which
no operation changes in place, so they are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from diloco.model import named_parameters
from diloco.model.tensor_file import Entry, Window, header_of
from diloco.protocol.object_digest import part_count
from diloco.ranks.command_channel import CommandChannel
from diloco.store.base import PART_BYTES


@dataclass(frozen=True, kw_only=True)
class SharedTensor:
    """A tensor of the state. Only the leader has one of the caller's own objects."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_leaders: bool

    def empty(self, device: str) -> Tensor:
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """This rank's slice of the residual of a fragment."""

    name: str
    fragment: int
    held: Tensor


def share_edges(size_bytes: int, ranks: int) -> list[int]:
    """Return where the share of each rank of an object begins, and the end of the last one."""
    parts = part_count(size_bytes)
    return [min(size_bytes, -(-parts * n // ranks) * PART_BYTES) for n in range(ranks + 1)]


@dataclass
class StateShare:
    """The bytes of an object from ``start`` that one rank writes, and its residuals; ``sizes`` are
    those of all ranks."""

    start: int
    sizes: tuple[int, ...]
    memory: Tensor
    residuals: Sequence[Residual] = field(default_factory=list)

    @classmethod
    def of(cls, size_bytes: int, channel: CommandChannel) -> StateShare:
        """Divide an object evenly into whole parts; an object of few parts has empty shares."""
        edges = share_edges(size_bytes, channel.size)
        sizes = tuple(stop - start for start, stop in pairwise(edges))
        memory = torch.empty(sizes[channel.rank], dtype=torch.uint8)
        return cls(start=edges[channel.rank], sizes=sizes, memory=memory)

    def put(self, at: int, data: Tensor) -> None:
        """Copy those of the bytes ``data`` from ``at`` that are in the share."""
        low, high = max(at, self.start), min(at + data.numel(), self.start + self.memory.numel())
        if low < high:
            self.memory[low - self.start : high - self.start].copy_(data[low - at : high - at])

    def parts(self) -> Iterator[memoryview]:
        """Yield the bytes in parts."""
        for part in torch.split(self.memory, PART_BYTES):
            yield memoryview(part.numpy())  # type: ignore[arg-type]


@torch.no_grad()
def copied(
    tensors: Sequence[SharedTensor], own: Mapping[str, Tensor], channel: CommandChannel
) -> StateShare:
    """Copy this rank's share of an object of ``tensors``, in their order. ``own`` are the tensors
    of this rank; all ranks call this together."""
    header = header_of({tensor.name: tensor.empty("meta") for tensor in tensors})
    body_bytes = sum(tensor.empty("meta").nbytes for tensor in tensors)
    share = StateShare.of(len(header) + body_bytes, channel)
    share.put(0, torch.frombuffer(bytearray(header), dtype=torch.uint8))
    at = len(header)
    for tensor in tensors:
        if tensor.is_leaders:
            values = tensor.empty("cpu")
            if channel.is_leader:
                values.copy_(own[tensor.name])
            if values.numel():
                channel.broadcast(values.reshape(-1).view(torch.uint8))
        else:
            values = named_parameters.read(own[tensor.name])
        data = values.detach().contiguous().reshape(-1).view(torch.uint8)
        share.put(at, data)
        at += data.numel()
    return share


class SavedShares:
    """The tensors of a saved optimizer state, of which each rank has read its share.

    ``skeleton`` is the JSON tree of the state (:mod:`diloco.model.state_tree`), ``size_bytes`` that
    of the object.
    """

    def __init__(self, skeleton: Any, size_bytes: int, channel: CommandChannel) -> None:
        self.skeleton = skeleton
        self.names = frozenset(tensor_names(skeleton))
        self._edges = share_edges(size_bytes, channel.size)
        self._rank = channel.rank
        self._entries: dict[str, Entry] = {}
        self._read: dict[str, Tensor] = {}

    def window(self, entry: Entry) -> Window:
        """Return the elements of a tensor that this rank reads."""
        self._entries[entry.name] = entry
        first, stop = self._elements(entry, self._rank)
        into = self._read[entry.name] = torch.empty(stop - first, dtype=entry.dtype)
        return Window(first, into)

    def _elements(self, entry: Entry, rank: int) -> tuple[int, int]:
        """Return the elements of a tensor, from first to stop, that begin in the share of a
        rank."""
        size, numel = entry.dtype.itemsize, math.prod(entry.shape)
        first, stop = (-(-(edge - entry.start) // size) for edge in self._edges[rank : rank + 2])
        return min(max(first, 0), numel), min(max(stop, 0), numel)

    def entry(self, name: str) -> Entry:
        """Return the description of a tensor. Raises :class:`ValueError`."""
        if name not in self._entries:
            raise ValueError(f"expected a saved tensor {name!r}, found none")
        return self._entries[name]

    def take(self, name: str, channel: CommandChannel) -> Tensor:
        """Return a whole tensor on every rank, from the elements that each has read, which are
        freed. All ranks call this together."""
        entry, own = self._entries[name], self._read.pop(name)
        whole = torch.empty(math.prod(entry.shape), dtype=entry.dtype)
        for rank in range(channel.size):
            first, stop = self._elements(entry, rank)
            if first < stop:
                part = whole[first:stop]
                if rank == self._rank:
                    part.copy_(own)
                channel.broadcast(part.view(torch.uint8), root=rank)
        return whole.view(entry.shape)


def tensor_names(skeleton: Any) -> Iterator[str]:
    """Yield the names of the tensors of a tree."""
    match skeleton:
        case {"tensor": str(name)}:
            yield name
        case {"list": list(items)} | {"tuple": list(items)}:
            for item in items:
                yield from tensor_names(item)
        case {"dict": list(items)}:
            for item in items:
                yield from tensor_names(item[-1] if isinstance(item, list) and item else None)


def fitted(saved: SavedShares, skeleton: Any, own: Any, targets: dict[str, Tensor]) -> Any:
    """Return the saved tree ``skeleton`` with the tensors of ``own``, the same tree of this
    process; ``targets`` gets each of these by the name of the saved one. Raises
    :class:`ValueError` if the trees differ."""
    match skeleton:
        case {"tensor": str(name)}:
            entry = saved.entry(name)
            if not isinstance(own, Tensor):
                own = entry.empty()
            if tuple(own.shape) != entry.shape:
                raise ValueError(
                    f"expected a saved tensor of {list(own.shape)}, found one of "
                    f"{list(entry.shape)}"
                )
            targets[name] = own
            return own
        case {"list": list(items)} | {"tuple": list(items)}:
            if not isinstance(own, list | tuple) or len(own) != len(items):
                raise ValueError(f"expected {own!r:.100}, found {len(items)} saved values")
            return type(own)(
                fitted(saved, item, value, targets) for item, value in zip(items, own, strict=True)
            )
        case {"dict": list(items)}:
            found = dict(items)
            if not isinstance(own, Mapping):
                raise ValueError(f"expected {type(own).__name__}, found a saved dict")
            if found.keys() != own.keys():
                names = sorted(map(str, found.keys() ^ own.keys()))[:3]
                raise ValueError(f"expected the same names in the saved state, not {names}")
            return {key: fitted(saved, found[key], own[key], targets) for key in own}
    return skeleton
