"""A store that injects faults at random from a seed.

============  =====================================================================================
`drop``       the request is lost: the operation does not run, ``StoreUnavailable``
`lose``       the response is lost: the operation runs, ``StoreUnavailable``
`delay``      the clock advances by up to ``delay_s`` before the operation runs
`duplicate``  the operation runs twice; the result is that of either
`tear``       the connection breaks in the middle of a body, ``StoreUnavailable``; an upload leaves
              no object, a read returns no data
`late``       a write fails with ``StoreUnavailable`` and runs after some later operations, so that
              writes take effect in another order
`truncate``   a read returns fewer bytes than the object has, without an error
============  =====================================================================================

:class:`diloco.store.retry.RetryingStore` handles the first five. It cannot handle ``late``, which
replaces a newer object of the same writer by an older one, nor ``truncate``: readers handle these
with checksums and write-once keys.

The faults are a function of the seed and of the order of operations, so they are reproducible with
one thread only. Several threads can use the store, but then their interleaving decides.
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
    ObjectInfo,
    Pages,
    Store,
    StoreUnavailable,
)
from diloco.store.multipart import Data, MakeParts

T = TypeVar("T")

LATE_OPERATIONS = 5
"""Maximum number of operations before a late write takes effect."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probability of each fault per operation that can have it."""

    drop: float = 0.0
    lose: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    tear: float = 0.0
    late: float = 0.0
    truncate: float = 0.0
    delay_s: float = 5.0


class FaultyStore:
    """A store that applies ``faults`` to the operations of ``inner``; ``injected`` counts them by
    name."""

    def __init__(self, inner: Store, *, rng: random.Random, clock: Clock, faults: Faults) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.atomic_create = inner.atomic_create
        self.faults = faults
        self.injected: Counter[str] = Counter()
        self._rng = rng
        self._clock = clock
        self._lock = threading.Lock()
        self._delayed: list[tuple[int, Callable[[], object]]] = []

    def put(self, key: str, data: Data) -> None:
        body = bytes(data)
        self._write(f"put {key}", lambda: self.inner.put(key, body))

    def create(self, key: str, data: Data) -> bool:
        body = bytes(data)
        return self._write(f"create {key}", lambda: self.inner.create(key, body))

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        """Applies the faults of a write; ``duplicate`` and ``late`` keep a copy of the parts."""
        request = f"put {key}"
        if self._injects("tear"):
            self._abort_upload(key, make_parts)
            raise StoreUnavailable(f"{request}: torn")
        body = [bytes(part) for part in make_parts()]
        put = self.inner.put_stream
        self._write(request, lambda: put(key, lambda: body, size_bytes=size_bytes))

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
        """Run every delayed write now."""
        self._run_delayed(everything=True)

    def _injects(self, fault: str) -> bool:
        with self._lock:
            injected: bool = self._rng.random() < getattr(self.faults, fault)
            self.injected[fault] += injected
        return injected

    def _request(self, request: str, operation: Callable[[], T]) -> T:
        self._run_delayed()
        if self._injects("delay"):
            with self._lock:
                delay_s = self._rng.uniform(0, self.faults.delay_s)
            self._clock.sleep(delay_s)
        if self._injects("drop"):
            raise StoreUnavailable(f"{request}: dropped")
        results = [operation()]
        if self._injects("duplicate"):
            results.append(operation())
        if self._injects("lose"):
            raise StoreUnavailable(f"{request}: the response was lost")
        with self._lock:
            return self._rng.choice(results)

    def _write(self, request: str, operation: Callable[[], T]) -> T:
        if self._injects("late"):
            with self._lock:
                wait = self._rng.randint(1, LATE_OPERATIONS)
                self._delayed.append((wait, operation))
            raise StoreUnavailable(f"{request}: no response yet")
        return self._request(request, operation)

    def _read(self, request: str, operation: Callable[[], bytes]) -> bytes:
        data = self._request(request, operation)
        if self._injects("tear"):
            raise StoreUnavailable(f"{request}: torn")
        if data and self._injects("truncate"):
            with self._lock:
                return data[: self._rng.randrange(len(data))]
        return data

    def _run_delayed(self, *, everything: bool = False) -> None:
        with self._lock:
            waiting = [(wait - 1, operation) for wait, operation in self._delayed]
            due = [operation for wait, operation in waiting if everything or wait <= 0]
            self._delayed = [] if everything else [pair for pair in waiting if pair[0] > 0]
        for operation in due:
            operation()

    def _abort_upload(self, key: str, make_parts: MakeParts) -> None:
        """Upload up to two parts, then fail before the end of the stream."""

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
        raise AssertionError(
            f"{key}: expected the error of the stream's iterator, found a complete upload"
        )
