"""Shards by replica number: the samples of one replica, without a record in the bucket. No torch.

In each epoch, replica r of R has the part of the epoch's order from ``samples * r // R`` to
``samples * (r + 1) // R``. The parts are disjoint and together are the epoch, for any R. Sample n
of a replica is a function of (seed, index, r, R, n), so a position is one number, and every process
that has it continues at the same sample. If a replica does not train, its part is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.data.order import MIX, EpochOrder, sample_counts
from diloco.data.shard_index import BadIndex, ShardIndex
from diloco.data.shard_reader import ShardReader
from diloco.store.base import Store


class Place(NamedTuple):
    """A sample: its position in the order of an epoch."""

    epoch: int
    position: int


class SampleOrder:
    """The samples of all epochs. ``seed`` and ``mix`` are those of
    :class:`~diloco.data.order.EpochOrder`."""

    def __init__(self, index: ShardIndex, *, context: int, seed: int, mix: int = MIX) -> None:
        if context < 1 or mix < 1:
            raise ValueError(f"expected context and mix of 1 or more, found {context} and {mix}")
        counts = sample_counts([shard.tokens for shard in index.train], context)
        self.context = context
        self.samples = int(counts.sum())
        self.epoch = lru_cache(maxsize=2)(
            lambda epoch: EpochOrder(counts, seed=seed, epoch=epoch, mix=mix)
        )


class SampleReader:
    """Reads samples by their places, and the shards of the places to come ahead."""

    def __init__(
        self, store: Store, index: ShardIndex, order: SampleOrder, *, mix: int = MIX
    ) -> None:
        self.order = order
        self.shards = ShardReader(store, index, held=2 * mix)

    def read(self, places: Iterable[Place]) -> npt.NDArray[Any]:
        """Return samples, (samples, context + 1). Raises :class:`BadIndex` for a damaged shard."""
        samples = [self.order.epoch(place.epoch).at(place.position) for place in places]
        return self.shards.windows(samples, self.order.context)

    def read_ahead(self, place: Place, stop: int) -> None:
        """Start reading the shards of ``place`` and of the next group, unless that begins at or
        after the position ``stop``."""
        order = self.order.epoch(place.epoch)
        group = order.group_of(place.position)
        wanted = list(order.shards_of(group))
        if order.end_of(group) < stop:
            wanted += order.shards_of(group + 1)
        self.shards.read_ahead(wanted)


class ReplicaPart:
    """The samples of replica ``replica`` of ``replicas``, in order. Raises :class:`BadIndex` if
    there are fewer samples than replicas."""

    def __init__(self, order: SampleOrder, *, replica: int, replicas: int) -> None:
        if not 0 <= replica < replicas:
            raise ValueError(f"expected a replica from 0 to {replicas - 1}, found {replica}")
        if order.samples < replicas:
            raise BadIndex(
                f"train: expected at least {replicas:,} samples of {order.context + 1:,} tokens, "
                f"one for each replica, found {order.samples:,}"
            )
        self.start = order.samples * replica // replicas
        self.stop = order.samples * (replica + 1) // replicas

    @property
    def samples(self) -> int:
        """Samples of this replica in an epoch."""
        return self.stop - self.start

    def at(self, number: int) -> Place:
        """Return the place of sample ``number`` of this replica, counted over all epochs."""
        epoch, position = divmod(number, self.samples)
        return Place(epoch, self.start + position)

    def places(self, first: int, count: int) -> Iterator[Place]:
        return (self.at(number) for number in range(first, first + count))


def read_batch(reader: SampleReader, part: ReplicaPart, first: int, count: int) -> npt.NDArray[Any]:
    """Return the samples ``first`` to ``first + count - 1`` of a replica, (count, context + 1), and
    read ahead."""
    places = list(part.places(first, count))
    reader.read_ahead(places[0], part.stop)
    batch = reader.read(places)
    return np.ascontiguousarray(batch)
