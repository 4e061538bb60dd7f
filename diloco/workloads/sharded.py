"""The data of the built-in workloads: windows of text in memory, or samples of token shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco.data.group_units import UnitGroup, take_units
from diloco.data.sample_stream import (
    Place,
    ReplicaPart,
    SampleOrder,
    SampleReader,
    read_batch,
)
from diloco.data.shard_check import ShardNeeds, check_settings, open_index
from diloco.data.shard_index import BadIndex, ShardIndex
from diloco.data.shard_reader import held_out_windows, patient
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.protocol.workload import BY_UNITS
from diloco.store.base import StoreError
from diloco.store.open import open_store
from diloco.workloads.base import random_starts

Tokens = npt.NDArray[Any]


class TrainingData(Protocol):
    """The training data of one replica."""

    def batch(self, step: int) -> Tokens:
        """Return the batch of a step, (batch_size, context + 1)."""
        ...


class RandomWindows:
    """Random windows of tokens in memory."""

    def __init__(
        self, tokens: Tokens, settings: GroupSettings, *, replica: int, context: int
    ) -> None:
        self.tokens, self._settings, self._replica = tokens, settings, replica
        self._window = np.arange(context + 1)

    def batch(self, step: int) -> Tokens:
        positions = len(self.tokens) - len(self._window) + 1
        starts = random_starts(
            self._settings, replica=self._replica, step=step, positions=positions
        )
        windows: Tokens = self.tokens[starts[:, None] + self._window]
        return windows


class ShardedSamples:
    """The samples of a replica's part of the shards (:mod:`diloco.data.sample_stream`)."""

    def __init__(self, reader: SampleReader, settings: GroupSettings, *, replica: int) -> None:
        self._reader = reader
        self._part = ReplicaPart(reader.order, replica=replica, replicas=settings.max_replicas)
        self._batch_size = settings.batch_size

    def batch(self, step: int) -> Tokens:
        return read_batch(self._reader, self._part, step * self._batch_size, self._batch_size)


class UnitSamples:
    """The samples of work units (:mod:`diloco.data.work_units`). Call :meth:`attach` after the
    join; a batch is not a function of the step."""

    def __init__(self, reader: SampleReader, index: ShardIndex, settings: GroupSettings) -> None:
        check_settings(settings)
        self._reader, self._index, self._settings = reader, index, settings
        self._take: Callable[[int], list[Place]] | None = None

    def attach(self, group: UnitGroup) -> None:
        """Claim units as a replica of ``group``; of several ranks, all call this."""
        self._take = take_units(group, self._index, self._reader.order, seed=self._settings.seed)

    def batch(self, step: int) -> Tokens:
        assert self._take is not None, "attach to the group first"
        places = self._take(self._settings.batch_size)
        for place in (places[0], places[-1]):
            self._reader.read_ahead(place, place.position)
        return self._reader.read(places)


def load_shards(
    data: str,
    settings: GroupSettings,
    *,
    replica: int,
    context: int,
    eval_tokens: int,
    vocabulary: int,
    digest: str,
    coverage: str,
) -> tuple[TrainingData, Tokens]:
    """Open the shards at the URI ``data`` for a model of ``vocabulary`` tokens and the tokenizer
    with this digest; return a replica's samples and the held-out windows, (windows, context + 1).

    Raises :class:`SettingsError` on ``data``.
    """
    try:
        store = patient(open_store(data))
        needs = ShardNeeds(
            context=context,
            parts=settings.max_replicas,
            batch_size=settings.batch_size,
            vocabulary=vocabulary,
            digest=digest,
        )
        index = open_index(store, needs)
        held_out = held_out_windows(store, index, context=context, tokens=eval_tokens)
    except (StoreError, BadIndex) as error:
        raise SettingsError("data", f"expected token shards at {data!r}: {error}") from error
    order = SampleOrder(index, context=context, seed=settings.seed)
    reader = SampleReader(store, index, order)
    if coverage == BY_UNITS:
        return UnitSamples(reader, index, settings), held_out
    return ShardedSamples(reader, settings, replica=replica), held_out
