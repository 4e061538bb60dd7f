"""Token shards as an iterable of samples, for a training loop of one's own.

:class:`TokenShards` is a :class:`torch.utils.data.IterableDataset` with ``state_dict``: iterate
over it, or pass it to a ``DataLoader`` or torchdata's ``StatefulDataLoader``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.data import IterableDataset, get_worker_info

from diloco.data.group_units import UnitGroup, take_units
from diloco.data.order import MIX
from diloco.data.sample_stream import Place, ReplicaPart, SampleOrder, SampleReader
from diloco.data.shard_index import BadIndex, ShardIndex, read_index
from diloco.data.shard_reader import patient
from diloco.store.base import Store
from diloco.store.open import open_store

log = logging.getLogger(__name__)

DAMAGED = ("refuse", "skip")
MOST_DAMAGED = 1 / 100
"""Share of the shards that can be skipped because they are damaged."""


class TokenShards(IterableDataset[Tensor]):
    """The samples of one replica, and of one rank of it, as (context + 1,) int64: ``sample[:-1]``
    are the inputs and ``sample[1:]`` the targets.

    Endless: after an epoch the next one begins, in another order. ``state_dict`` has the position,
    to the sample; pass the object in ``join(stateful=...)`` to save it with the replica state.
    Ranks read the samples of their replica in turn, so the number of ranks can change between two
    processes. A state of another number of replicas continues with the next epoch.

    Args:
        uri: where ``python -m diloco.tokenize`` wrote the shards.
        context: tokens that a sample predicts.
        seed: of the order; the same on all replicas.
        replica: number of this replica. Without it, call :meth:`assign` after ``join``.
        replicas: number of parts that an epoch is divided into.
        rank: rank in the replica, by default that of ``torch.distributed``.
        ranks: ranks of the replica.
        mix: shards whose samples are mixed. Twice as many are in memory.
        damaged: "refuse" raises :class:`~diloco.data.shard_index.BadIndex` at a damaged shard,
            "skip" logs its name and goes on with the samples of others, up to a hundredth of all.
        store: the store of the shards, instead of the one that ``uri`` names.
    """

    def __init__(
        self,
        uri: str,
        *,
        context: int,
        seed: int = 0,
        replica: int | None = None,
        replicas: int = 1,
        rank: int | None = None,
        ranks: int | None = None,
        mix: int = MIX,
        damaged: str = "refuse",
        store: Store | None = None,
    ) -> None:
        if damaged not in DAMAGED:
            raise ValueError(f"damaged: expected one of {', '.join(DAMAGED)}, found {damaged!r}")
        many = distributed.is_available() and distributed.is_initialized()
        self.uri, self.context, self.seed = uri, context, seed
        self._mix, self._damaged = mix, damaged
        self._rank = (distributed.get_rank() if many else 0) if rank is None else rank
        self._ranks = (distributed.get_world_size() if many else 1) if ranks is None else ranks
        if not 0 <= self._rank < self._ranks:
            raise ValueError(f"expected a rank from 0 to {self._ranks - 1}, found {self._rank}")
        self._given_store = store
        self.index: ShardIndex = read_index(self._store())
        self._order = SampleOrder(self.index, context=context, seed=seed, mix=mix)
        self._first = 0
        """Samples of the replica that earlier processes have read."""
        self._taken = 0
        """Samples of this rank, or of this worker of its data loader, since then."""
        self._skipped: set[str] = set()
        self._reader: SampleReader | None = None
        self._take_unit: Callable[[], Place] | None = None
        self._is_assigned = replica is not None
        self._replica, self._replicas = replica or 0, replicas
        self._part = ReplicaPart(self._order, replica=self._replica, replicas=replicas)

    def assign(self, replica: int, replicas: int) -> None:
        """Set the number of this replica, e.g. ``assign(group.replica,
        group.settings.max_replicas)``. A position of another number of replicas moves to the start
        of the next epoch."""
        part = ReplicaPart(self._order, replica=replica, replicas=replicas)
        if self._position() and self._replicas != replicas:
            epoch = self._part.at(self._position()).epoch + 1
            log.warning("the number of replicas has changed: continuing with epoch %d", epoch)
            self._first, self._taken = epoch * part.samples, 0
        self._part, self._replica, self._replicas = part, replica, replicas
        self._is_assigned = True

    def use_units(self, group: UnitGroup) -> None:
        """Read the samples of work units from now on, as a replica of ``group``, instead of those
        of a replica number: an epoch is seen exactly once while replicas come and go. Use it
        without workers of a data loader; of several ranks, all call this. Samples that were read
        count as trained at the end of their round."""
        take = take_units(group, self.index, self._order, seed=self.seed)
        self._take_unit = lambda: take(self._ranks)[self._rank]

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, counted from 0."""
        return self._part.at(self._position()).epoch

    def _position(self) -> int:
        """Samples of the replica that were read, if all ranks have read equally many."""
        return self._first + self._taken * self._ranks

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        if worker and self._take_unit is not None:
            raise ValueError("expected a data loader without workers for work units")
        readers = self._ranks * workers
        if self._reader is None:
            store = self._store()
            self._reader = SampleReader(store, self.index, self._order, mix=self._mix)
        while True:
            if self._take_unit is not None:
                place = self._take_unit()
                self._reader.read_ahead(place, place.position)
            else:
                at = self._first + self._taken * readers + number * self._ranks + self._rank
                place = self._part.at(at)
                self._reader.read_ahead(place, self._part.stop)
            sample = self._read(self._reader, place)
            self._taken += 1
            if sample is not None:
                yield sample

    def _read(self, reader: SampleReader, place: Place) -> Tensor | None:
        """Return a sample; None for one of a damaged shard, if these are skipped."""
        shard = self.index.train[reader.order.epoch(place.epoch).at(place.position).shard]
        if shard.name in self._skipped:
            return None
        try:
            [row] = reader.read([place])
        except BadIndex as error:
            self._skip(shard.name, error)
            return None
        return torch.from_numpy(row.astype("int64"))

    def _skip(self, name: str, error: BadIndex) -> None:
        if self._damaged == "refuse":
            raise error
        log.error("%s; its samples are skipped", error)
        self._skipped.add(name)
        most = max(1, int(len(self.index.train) * MOST_DAMAGED))
        if len(self._skipped) > most or len(self._skipped) == len(self.index.train):
            raise BadIndex(
                f"expected at most {most} damaged shards of {len(self.index.train)} at {self.uri}, "
                f"found more: {', '.join(sorted(self._skipped))[:500]}"
            ) from error

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of the damaged shards that were skipped."""
        return tuple(sorted(self._skipped))

    def state_dict(self) -> dict[str, Any]:
        """Return the position. In a data loader with workers, use ``StatefulDataLoader``."""
        return {
            "shards": self.index.digest,
            "context": self.context,
            "seed": self.seed,
            "replica": self._replica,
            "replicas": self._replicas,
            "first": self._first,
            "taken": self._taken,
            "ranks": self._ranks,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the position of a :meth:`state_dict`. Raises :class:`ValueError` for other
        shards, another context or seed."""
        own = self.state_dict()
        for name in ("shards", "context", "seed"):
            if state_dict[name] != own[name]:
                raise ValueError(
                    f"{name}: expected the one of the saved state, {state_dict[name]!r}, "
                    f"found {own[name]!r}"
                )
        replica, replicas = self._replica, self._replicas
        self._replica, self._replicas = state_dict["replica"], state_dict["replicas"]
        self._part = ReplicaPart(self._order, replica=self._replica, replicas=self._replicas)
        if state_dict["ranks"] == self._ranks:
            self._first, self._taken = state_dict["first"], state_dict["taken"]
        else:
            self._first = state_dict["first"] + state_dict["taken"] * state_dict["ranks"]
            self._taken = 0
        if self._is_assigned:
            self.assign(replica, replicas)

    def _store(self) -> Store:
        return patient(self._given_store or open_store(self.uri))

    def __getstate__(self) -> dict[str, Any]:
        """A worker of a data loader opens the store itself."""
        return self.__dict__ | {"_reader": None, "_order": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = SampleOrder(self.index, context=self.context, seed=self.seed, mix=self._mix)
