"""A store on which everything goes wrong that can, by seeded chance: for tests and simulations.

=============  =====================================================================================
``drop``       the request never arrives: nothing is done, ``StoreUnavailable``
``lose``       the answer never arrives: it is done, ``StoreUnavailable`` all the same
``delay``      the clock goes on by up to ``delay_s`` before it is done
``duplicate``  the request arrives twice; the answer is that of either
``tear``       the connection breaks half-way through a body: an upload leaves nothing, a read
               answers nothing, ``StoreUnavailable``
``late``       a write is not done yet, ``StoreUnavailable``; it is done after some more operations,
               so that writes land in another order than they were made
``truncate``   a read answers fewer bytes than there are, and says nothing
=============  =====================================================================================

:class:`diloco.store.retry.RetryingStore` makes up for the first five. Not for ``late``, which
replaces a newer object of the same writer by an older one, and not for ``truncate``: those are for
whoever reads, by checksums and by keys that are written once.

What happens is a function of the seed and of the order of operations, so of one thread; many may
use the store, but how their operations mix is up to the machine.
"""

from __future__ import annotations

import builtins
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from diloco.clock import Clock
from diloco.store.base import (
    LISTED,
    Data,
    MakeParts,
    ObjectInfo,
    Pages,
    Store,
    StoreUnavailable,
)

T = TypeVar("T")

LATE_OPERATIONS = 5
"""A late write lands after at most so many further operations."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probability of each fault, for each operation that can have it."""

    drop: float = 0.0
    lose: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    tear: float = 0.0
    late: float = 0.0
    truncate: float = 0.0
    delay_s: float = 5.0


class FaultyStore:
    """``inner``, through a bad network. ``injected`` counts what was done to its user."""

    def __init__(self, inner: Store, *, rng: random.Random, clock: Clock, faults: Faults) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.atomic_create = inner.atomic_create
        self.faults = faults
        self.injected: Counter[str] = Counter()
        self._rng = rng
        self._clock = clock
        self._lock = threading.Lock()
        self._on_their_way: list[tuple[int, Callable[[], object]]] = []

    def put(self, key: str, data: Data) -> None:
        sent = bytes(data)
        self._write(f"put {key}", lambda: self.inner.put(key, sent))

    def create(self, key: str, data: Data) -> bool:
        sent = bytes(data)
        return self._write(f"create {key}", lambda: self.inner.create(key, sent))

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        """Faults of a write; ``duplicate`` and ``late`` keep the parts, as a network would."""
        what = f"put {key}"
        if self._strikes("tear"):
            self._break_off(key, make_parts)
            raise StoreUnavailable(f"{what}: torn")
        sent = [bytes(part) for part in make_parts()]
        self._write(what, lambda: self.inner.put_stream(key, lambda: sent))

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self._read(f"get {key}", lambda: self.inner.get(key, limit=limit))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._read(f"get {key}", lambda: self.inner.get_range(key, start, length))

    def list(self, prefix: str, *, limit: int = LISTED) -> builtins.list[ObjectInfo]:
        return self._request(f"list {prefix}", lambda: self.inner.list(prefix, limit=limit))

    def list_pages(self, prefix: str) -> Pages:
        yield from self._request(f"list {prefix}", lambda: [*self.inner.list_pages(prefix)])

    def delete(self, keys: Iterable[str]) -> None:
        names = [*keys]
        self._request("delete", lambda: self.inner.delete(names))

    def settle(self) -> None:
        """Lets every late write land now."""
        self._land(everything=True)

    def _strikes(self, fault: str) -> bool:
        with self._lock:
            struck: bool = self._rng.random() < getattr(self.faults, fault)
            self.injected[fault] += struck
        return struck

    def _request(self, what: str, operation: Callable[[], T]) -> T:
        self._land()
        if self._strikes("delay"):
            with self._lock:
                delay_s = self._rng.uniform(0, self.faults.delay_s)
            self._clock.sleep(delay_s)
        if self._strikes("drop"):
            raise StoreUnavailable(f"{what}: dropped")
        answers = [operation()]
        if self._strikes("duplicate"):
            answers.append(operation())
        if self._strikes("lose"):
            raise StoreUnavailable(f"{what}: the answer was lost")
        with self._lock:
            return self._rng.choice(answers)

    def _write(self, what: str, operation: Callable[[], T]) -> T:
        if self._strikes("late"):
            with self._lock:
                wait = self._rng.randint(1, LATE_OPERATIONS)
                self._on_their_way.append((wait, operation))
            raise StoreUnavailable(f"{what}: no answer yet")
        return self._request(what, operation)

    def _read(self, what: str, operation: Callable[[], bytes]) -> bytes:
        data = self._request(what, operation)
        if self._strikes("tear"):
            raise StoreUnavailable(f"{what}: torn")
        if data and self._strikes("truncate"):
            with self._lock:
                return data[: self._rng.randrange(len(data))]
        return data

    def _land(self, *, everything: bool = False) -> None:
        with self._lock:
            waiting = [(wait - 1, operation) for wait, operation in self._on_their_way]
            landing = [operation for wait, operation in waiting if everything or wait <= 0]
            self._on_their_way = [] if everything else [pair for pair in waiting if pair[0] > 0]
        for operation in landing:
            operation()

    def _break_off(self, key: str, make_parts: MakeParts) -> None:
        """Upload up to two parts and fail before the end, wherever that is."""

        class Torn(Exception):
            pass

        with self._lock:
            before = self._rng.randint(0, 2)

        def parts() -> Iterator[Data]:
            for index, part in enumerate(make_parts()):
                if index == before:
                    break
                yield part
            raise Torn

        try:
            self.inner.put_stream(key, parts)
        except Torn:
            return
        raise AssertionError(f"{key}: a stream that failed was taken for whole")
