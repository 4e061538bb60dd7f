"""The data of the built-in workloads: windows of text in memory, or samples of token shards."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco.data.sample_stream import ReplicaPart, SampleOrder, SampleReader, read_batch
from diloco.data.shard_check import ShardNeeds, open_index
from diloco.data.shard_index import BadIndex, ShardIndex
from diloco.data.shard_reader import held_out_windows, patient
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import Store, StoreError
from diloco.store.open import open_store
from diloco.workloads.base import random_starts

Tokens = npt.NDArray[Any]


class TrainingData(Protocol):
    """The training data of one replica."""

    def batch(self, step: int) -> Tokens:
        """Return the batch of a step, (batch_size, context + 1): a pure function of (seed, replica,
        step)."""
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

    def __init__(
        self,
        store: Store,
        index: ShardIndex,
        settings: GroupSettings,
        *,
        replica: int,
        context: int,
    ) -> None:
        order = SampleOrder(index, context=context, seed=settings.seed)
        self._part = ReplicaPart(order, replica=replica, replicas=settings.max_replicas)
        self._reader = SampleReader(store, index, order)
        self._batch_size = settings.batch_size

    def batch(self, step: int) -> Tokens:
        return read_batch(self._reader, self._part, step * self._batch_size, self._batch_size)


def load_shards(
    data: str,
    settings: GroupSettings,
    *,
    replica: int,
    context: int,
    eval_tokens: int,
    vocabulary: int,
    digest: str,
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
    return ShardedSamples(store, index, settings, replica=replica, context=context), held_out
