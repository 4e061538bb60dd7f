"""One rank's share of the saved state of a replica of several ranks.

The optimizer state of a model is whole on every rank (DistributedDataParallel) or divided over them
(FSDP2). It is copied tensor by tensor, which all ranks do together, and each rank keeps the bytes
of its share of the object: no rank has all of it. The residuals of error feedback are slices, which
no operation changes in place, so they are not copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from diloco.model import named_parameters
from diloco.model.tensor_file import header_of
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
        parts, ranks = part_count(size_bytes), channel.size
        edges = [min(size_bytes, -(-parts * n // ranks) * PART_BYTES) for n in range(ranks + 1)]
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
