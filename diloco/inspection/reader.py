"""Reads records in parallel, and finds the last of consecutively numbered objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from diloco.inspection.picture import Unreadable
from diloco.protocol import keys
from diloco.protocol.packed_telemetry import pack_key, read_pack
from diloco.protocol.records import BadRecord, Identity, Record
from diloco.protocol.telemetry import Segment
from diloco.store.base import MissingKey, Store, exists

R = TypeVar("R", bound=Record)


@dataclass
class Reader:
    """Reads records in parallel and collects the unreadable ones."""

    store: Store
    pool: ThreadPoolExecutor
    unreadable: list[Unreadable] = field(default_factory=list)
    _pack: tuple[str, dict[int, bytes]] = ("", {})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, key: str, kind: type[R]) -> R | None:
        """Return the record; None if the object is missing or is not such a record."""
        try:
            return kind.read(self.store, key)
        except MissingKey:
            return None
        except BadRecord as error:
            self.unreadable.append(Unreadable(key=key, reason=str(error)))
            return None

    def read_all(self, wanted: Iterable[str], kind: type[R]) -> list[R | None]:
        """Return the records in the order of their keys; see :meth:`read`."""
        return list(self.pool.map(lambda key: self.read(key, kind), wanted))

    def read_segments(self, wanted: Iterable[tuple[Identity, int]]) -> list[Segment | None]:
        """Return telemetry segments by process and number, packed or not; see :meth:`read`."""

        def read_one(identity: Identity, n: int) -> Segment | None:
            key = keys.telemetry(identity.replica, identity.incarnation, n)
            segment = self.read(key, Segment)
            if segment is not None or (data := self.pack(identity, n).get(n)) is None:
                return segment
            try:
                return Segment.from_bytes(data)
            except BadRecord as error:
                self.unreadable.append(Unreadable(key=key, reason=str(error)))
                return None

        return list(self.pool.map(lambda one: read_one(*one), wanted))

    def pack(self, identity: Identity, n: int) -> dict[int, bytes]:
        """Return the segments of the pack of segment ``n``; empty without a readable one. The last
        one read is kept for the next call."""
        key = pack_key(identity.replica, identity.incarnation, n)
        with self._lock:
            if self._pack[0] == key:
                return self._pack[1]
            try:
                segments = read_pack(self.store, identity.replica, identity.incarnation, n)
            except BadRecord as error:
                self.unreadable.append(Unreadable(key=key, reason=str(error)))
                segments = {}
            self._pack = (key, segments) if segments else self._pack
            return segments

    def exists(self, key: str) -> bool:
        """Return whether there is an object under ``key``."""
        return exists(self.store, key)


def find_last(exists: Callable[[int], bool], *, hint: int) -> int:
    """Return the largest n with ``exists(n)`` of numbers that are consecutive from 1; 0 if there is
    none.

    Galloping search from ``hint``, then bisection: a good hint takes two calls.
    """
    low, step = max(0, hint - 1), 1
    while low and not exists(low):
        low, step = max(0, low - step), 2 * step
    step = 1
    while exists(low + step):
        low, step = low + step, 2 * step
    missing = low + step
    while missing - low > 1:
        middle = (low + missing) // 2
        low, missing = (middle, missing) if exists(middle) else (low, middle)
    return low
