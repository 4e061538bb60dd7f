"""A store that counts requests and bytes, for telemetry and benchmarks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diloco.store.base import LISTED, ObjectInfo, Pages, Store
from diloco.store.multipart import Data, MakeParts


@dataclass
class StoreUsage:
    """Requests and bytes of a :class:`MeteredStore` since its creation."""

    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class MeteredStore:
    """Counts the requests to ``inner`` and their bytes. Safe for use by several threads."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.atomic_create = inner.atomic_create
        self.usage = StoreUsage()
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        self.inner.put(key, data)
        self._count(up=len(data))

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        """Counts one request for a single part, else one per part and two to begin and complete the
        upload."""
        sizes: list[int] = []

        def parts() -> Iterator[Data]:
            sizes.clear()
            for part in make_parts():
                sizes.append(len(part))
                yield part

        self.inner.put_stream(key, parts, size_bytes=size_bytes)
        self._count(len(sizes) + 2 if len(sizes) > 1 else 1, up=sum(sizes))

    def create(self, key: str, data: Data) -> bool:
        created = self.inner.create(key, data)
        self._count(up=len(data))
        return created

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self._count()
        data = self.inner.get(key, limit=limit)
        self._count(0, down=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._count()
        data = self.inner.get_range(key, start, length)
        self._count(0, down=len(data))
        return data

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        self._count()
        return self.inner.list(prefix, limit=limit)

    def list_pages(self, prefix: str) -> Pages:
        for page in self.inner.list_pages(prefix):
            self._count()
            yield page

    def delete(self, keys: Iterable[str]) -> None:
        self._count()
        self.inner.delete(keys)

    def add(self, usage: StoreUsage) -> None:
        """Add the requests and bytes of another process of this replica."""
        self._count(usage.requests, up=usage.bytes_up, down=usage.bytes_down)

    def _count(self, requests: int = 1, *, up: int = 0, down: int = 0) -> None:
        with self._lock:
            self.usage.requests += requests
            self.usage.bytes_up += up
            self.usage.bytes_down += down
