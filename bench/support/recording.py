"""A store that counts requests and bytes by what the keys are for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diloco.store.base import LISTED, Data, MakeParts, MissingKey, ObjectInfo, Pages, Store

DATA_KINDS = ("payload", "reduced")
"""Kinds whose bytes are pseudo-gradients; everything else is control."""
POLL = "poll"
"""Kind of the reads of a payload that is not there yet, and of those of one byte."""


def kind_of(key: str) -> str:
    """payload, record, plan, commit, reduced, lease, poll or other."""
    if key == POLL:
        return key
    if key.startswith("members/"):
        return "lease"
    for kind, found in {
        "payload": key.endswith(".bin"),
        "record": "/contributions" in key,
        "reduced": "/reduced" in key,
        "plan": key.endswith("/plan.json"),
        "commit": key.endswith("/commit.json"),
    }.items():
        if found:
            return kind
    return "other"


@dataclass
class Traffic:
    """Requests and bytes of one kind."""

    puts: int = 0
    gets: int = 0
    lists: int = 0
    up: int = 0
    down: int = 0


class RecordingStore:
    """Counts as :class:`~diloco.store.metered.MeteredStore` does, but kind by kind."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.atomic_create = inner.atomic_create
        self.traffic: dict[str, Traffic] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        self.inner.put(key, data)
        self._count(key, puts=1, up=len(data))

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        sizes: list[int] = []

        def parts() -> Iterator[Data]:
            sizes.clear()
            for part in make_parts():
                sizes.append(len(part))
                yield part

        self.inner.put_stream(key, parts, size_bytes=size_bytes)
        # Several parts are begun and completed by a request each.
        self._count(key, puts=len(sizes) + 2 if len(sizes) > 1 else 1, up=sum(sizes))

    def create(self, key: str, data: Data) -> bool:
        created = self.inner.create(key, data)
        self._count(key, puts=1, up=len(data))
        return created

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self._count(key, gets=1)
        data = self.inner.get(key, limit=limit)
        self._count(key, down=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        is_payload = kind_of(key) == "payload"
        try:
            data = self.inner.get_range(key, start, length)
        except MissingKey:
            self._count(POLL if is_payload else key, gets=1)
            raise
        self._count(POLL if is_payload and length == 1 else key, gets=1, down=len(data))
        return data

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        self._count(prefix, lists=1)
        return self.inner.list(prefix, limit=limit)

    def list_pages(self, prefix: str) -> Pages:
        self._count(prefix, lists=1)
        return self.inner.list_pages(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)

    def _count(self, key: str, **more: int) -> None:
        with self._lock:
            traffic = self.traffic.setdefault(kind_of(key), Traffic())
            for name, count in more.items():
                setattr(traffic, name, getattr(traffic, name) + count)
