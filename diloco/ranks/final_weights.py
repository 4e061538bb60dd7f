"""The final weights of a replica of several ranks.

They are one object, because other programs read that file and its sha256 needs all bytes in order,
so the leader uploads it. Sharded tensors are gathered while it does, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter

import torch
from torch import Tensor, nn

from diloco.model import named_parameters
from diloco.model.tensor_file import check_storable, header_of, in_order, packed
from diloco.protocol.records import StoredObject
from diloco.ranks.collective_ops import Operation, Ranks
from diloco.ranks.command_channel import StepMessage
from diloco.store.base import Store
from diloco.training.stored_objects import put_parts


def put_final(ranks: Ranks, store: Store, key: str, tensors: Mapping[str, Tensor]) -> StoredObject:
    """Store ``tensors`` of the model's state, which can be sharded, from the leader. Each attempt
    of the upload gathers them again."""
    check_storable(tensors)
    described = in_order(
        {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in tensors.items()
        }
    )
    header = header_of(described)
    size_bytes = len(header) + sum(tensor.nbytes for tensor in described.values())
    reading: Iterator[Tensor] = iter(())

    def parts() -> Iterator[memoryview]:
        nonlocal reading
        exhaust(reading)
        ranks.all_reduce(StepMessage(operation=Operation.FINAL))
        wanted = filter(lambda item: item[0] in tensors, read_all(ranks.model))
        # A map, because an abort closes a generator, and then the rest would not be read.
        reading = map(itemgetter(1), wanted)
        return packed(header, reading, size_bytes)

    try:
        return put_parts(store, key, parts, sha256=True)
    finally:
        exhaust(reading)


def read_all(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (bare name, full tensor) of the model's state in the order of an object. All ranks must
    exhaust it."""
    for name, tensor in in_order(dict(named_parameters.unread_state(model))).items():
        yield name, named_parameters.read(tensor)


def exhaust(reading: Iterator[object]) -> None:
    """Take part in the rest of a collective read, e.g. after an upload that was aborted."""
    for _ in reading:
        pass
