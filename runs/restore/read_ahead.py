"""Reads the records of rounds ahead of the import, several rounds at once.

Live ingest reads one record after the other, each in its own thread with its own timeout. For ten
thousand rounds that is a hundred thousand threads, and as many latencies in sequence. Here a thread
reads :data:`BLOCK` rounds, and several threads run at once.

Reading ahead never decides anything: a block that fails, makes no progress for
:data:`~runs.ingest.stores.RECORD_PATIENCE_S` or has more than :data:`BLOCK_BYTES` is dropped from
that round on, and these rounds are read as live ingest reads them, with its errors and timeouts.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import TypeVar

from diloco.protocol.packed_rounds import BLOCK as PACKED_ROUNDS
from diloco.protocol.packed_rounds import PackedRounds, PackTooLarge
from diloco.store.base import Store
from runs.backends import parallel_calls
from runs.ingest.round_reader import RoundRecords, read_round
from runs.ingest.stores import RECORD_PATIENCE_S, BoundedStore, folder_store

logger = logging.getLogger(__name__)
T = TypeVar("T")

BLOCK = PACKED_ROUNDS
"""Rounds that one thread reads, one after the other: those of a pack, if there is one."""
AHEAD = 32
"""Blocks of a bucket that are read at once. Nearly all the time of its requests is latency."""
AHEAD_IN_FOLDER = 2
"""Blocks of a folder: its reads are short, so more threads cost more than they gain."""
BLOCK_BYTES = 2 << 20
"""Bytes of records that a block keeps in memory."""


class _Stopped(Exception):
    """The block is not needed any more, or has too many bytes."""


class _Watched(BoundedStore):
    """A store whose reads run in the calling thread and are counted. ``progress_s`` is when the
    last one began (monotonic)."""

    def __init__(self, inner: Store, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self.stopped = False
        self.progress_s = clock()
        self._clock = clock
        self._left_bytes = BLOCK_BYTES

    def _bounded(self, target: str, request: Callable[[], T], size_bytes: int) -> T:
        if self.stopped or self._left_bytes < 0:
            raise _Stopped
        self.progress_s = self._clock()
        result = request()
        self._left_bytes -= len(result) if isinstance(result, bytes) else 0
        return result


class _Block:
    """The rounds from ``first`` on, as far as they could be read ahead."""

    def __init__(
        self,
        store: BoundedStore,
        first: int,
        replicas: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self.numbers = range(first, first + BLOCK)
        self._replicas = replicas
        self._clock = clock
        self._watched = _Watched(store.inner, clock)
        self._reading: Future[None] | None = None
        self._rounds: dict[int, RoundRecords] = {}
        with contextlib.suppress(parallel_calls.CallTimeout):
            # A separate place: requests that hang here leave room for those of the import.
            place = f"{store.uri}, read ahead"
            self._reading = parallel_calls.begin(self._read, place=place, most=AHEAD)

    def _read(self) -> None:
        packs = PackedRounds(self._watched, packs_first=True, limit=BLOCK_BYTES)
        with contextlib.suppress(_Stopped, PackTooLarge):
            for number in self.numbers:
                records = read_round(packs, number, set(), self._replicas)
                self._rounds[number] = records
                if not is_closed(records):
                    return

    def result(self) -> dict[int, RoundRecords]:
        """Wait for the block, while it makes progress. Does not raise."""
        if self._reading is None:
            return {}
        while True:
            left_s = self._watched.progress_s + RECORD_PATIENCE_S - self._clock()
            if wait([self._reading], max(left_s, 0.0)).done:
                break
            if left_s <= 0:
                self.stop()
                return dict(self._rounds)
        if error := self._reading.exception():
            logger.info("rounds from %d on are read one by one: %s", self.numbers[0], error)
        return self._rounds

    def stop(self) -> None:
        self._watched.stopped = True


def closed_rounds(
    store: Store,
    first: int,
    replicas: frozenset[int],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[RoundRecords, None, None]:
    """Yield the rounds from ``first`` on, in order, up to the first without a commit.

    Closing the iterator stops the reads. Raises the store's errors.
    """
    bounded = store if isinstance(store, BoundedStore) else BoundedStore(store)
    firsts = itertools.count(first, BLOCK)

    def begun() -> _Block:
        return _Block(bounded, next(firsts), replicas, clock)

    packs = PackedRounds(store, packs_first=True)
    ahead = AHEAD if folder_store(store) is None else AHEAD_IN_FOLDER
    blocks = deque(begun() for _ in range(ahead))
    try:
        while True:
            block = blocks.popleft()
            ready = block.result()
            blocks.append(begun())
            for number in block.numbers:
                records = ready.pop(number, None) or read_round(packs, number, set(), replicas)
                if not is_closed(records):
                    return
                yield records
    finally:
        for block in blocks:
            block.stop()


def is_closed(records: RoundRecords) -> bool:
    """Whether the round has a commit, readable or not."""
    return records.commit is not None or bool(records.commit_refused)
