"""Reads shards whole, checks them, reads ahead, and holds a bounded number in memory. No disk.

A shard that fails its check is read three times: damage in transit repairs itself. After that
:class:`~diloco.data.shard_index.BadIndex` names it. A store that does not answer is retried for a
minute; then its error is raised, so a reader never hangs.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.clock import Clock, SystemClock
from diloco.data.order import Sample
from diloco.data.shard_index import BadIndex, Shard, ShardIndex, tokens_of
from diloco.store.base import MissingKey, NotAnObject, ObjectTooLarge, Store
from diloco.store.daemon import call_in_daemon
from diloco.store.retry import RetryingStore

log = logging.getLogger(__name__)

Tokens = npt.NDArray[Any]

READS = 3
"""Attempts to read a shard before it counts as damaged."""
DEADLINE_S = 60.0
"""How long a request to the store is retried."""


def patient(store: Store, clock: Clock | None = None) -> Store:
    """Return ``store`` with retries, for shards and their index."""
    rng = random.Random()
    return RetryingStore(store, clock=clock or SystemClock(), rng=rng, deadline_s=DEADLINE_S)


class ShardReader:
    """Samples of the training shards. ``held`` is the number of shards in memory, those that are
    being read included. Not safe for use by several threads."""

    def __init__(self, store: Store, index: ShardIndex, *, held: int) -> None:
        self.index = index
        self._store = store
        self._held = held
        self._shards: OrderedDict[int, Future[Tokens]] = OrderedDict()

    def read_ahead(self, shards: Iterable[int]) -> None:
        """Start reading these shards, as far as there is room: those named last have none."""
        for number in list(shards)[: self._held]:
            self._request(number)

    def windows(self, samples: Iterable[Sample], context: int) -> Tokens:
        """Return the samples, (samples, context + 1). Raises :class:`BadIndex` for a damaged
        shard, and :class:`~diloco.store.base.StoreError`."""
        rows = []
        for sample in samples:
            tokens = self._request(sample.shard).result()
            start = sample.window * context
            rows.append(tokens[start : start + context + 1])
        return np.stack(rows)

    def _request(self, number: int) -> Future[Tokens]:
        future = self._shards.get(number)
        if future is None or (future.done() and future.exception() is not None):
            read = partial(read_shard, self._store, self.index.train[number], self.index)
            future = call_in_daemon(read, name="shard")
            self._shards[number] = future
        self._shards.move_to_end(number)
        while len(self._shards) > self._held:
            self._shards.popitem(last=False)
        return future

    def close(self) -> None:
        """Drop the shards in memory."""
        self._shards.clear()


def read_shard(store: Store, shard: Shard, index: ShardIndex) -> Tokens:
    """Return the tokens of a shard, (tokens,). Raises :class:`BadIndex` if it stays damaged."""
    for attempt in range(READS):
        try:
            return tokens_of(
                shard, store.get(shard.name, limit=shard.size_bytes(index.dtype)), index
            )
        except (ObjectTooLarge, MissingKey, NotAnObject) as error:
            problem: Exception = BadIndex(
                f"shard {shard.name} of {store.uri}: expected an object of "
                f"{shard.size_bytes(index.dtype):,} bytes, found {_found(error)}"
            )
        except BadIndex as error:
            problem = error
        log.warning("%s (read %d of %d)", problem, attempt + 1, READS)
    raise problem


def _found(error: Exception) -> str:
    return "none" if isinstance(error, MissingKey) else str(error)


def held_out_windows(store: Store, index: ShardIndex, *, context: int, tokens: int) -> Tokens:
    """Return windows of held-out text that together predict about ``tokens`` tokens, (windows,
    context + 1): the first ones of each shard. Raises :class:`BadIndex`."""
    wanted = max(1, tokens // context)
    rows: list[Tokens] = []
    count = 0
    for shard in index.held_out:
        if count >= wanted:
            break
        text = read_shard(store, shard, index)
        windows = min((len(text) - 1) // context, wanted - count)
        rows += [text[n * context : n * context + context + 1] for n in range(windows)]
        count += windows
    if not rows:
        raise BadIndex(
            f"held_out: expected a window of {context + 1:,} held-out tokens, found "
            f"{sum(shard.tokens for shard in index.held_out):,} tokens in {len(index.held_out)} "
            "shards. Tokenize again with a larger --held-out"
        )
    return np.stack(rows)
