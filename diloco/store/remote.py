"""A bucket's store, opened by the engine that serves it best and once per process.

S3 goes through obstore where it is installed and its threads live; everything else, and S3 in a
process forked from one that has used obstore, through fsspec. A client inherited over a fork is
never used again: s3fs raises and obstore hangs, so the child opens its own on first use.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from diloco.store.base import LISTED, Data, MakeParts, ObjectInfo, Pages, Store
from diloco.store.fsspec import FsspecStore

_BY_OBSTORE = frozenset({"s3", "s3a"})


def open_remote(
    uri: str, *, sole_creator: bool = False, environment: Mapping[str, str] | None = None
) -> Store:
    """``environment``: see :func:`diloco.store.open.open_store`."""
    return PerProcessStore(
        lambda: _connect(uri, sole_creator=sole_creator, environment=environment)
    )


def _connect(uri: str, *, sole_creator: bool, environment: Mapping[str, str] | None) -> Store:
    installed = importlib.util.find_spec("obstore") and importlib.util.find_spec("botocore")
    if urlsplit(uri).scheme in _BY_OBSTORE and installed:
        from diloco.store import s3

        understood = environment is not None or s3.understands_options()
        if s3.usable() and understood:
            return s3.ObstoreStore(uri, environment=environment)
    return FsspecStore(uri, sole_creator=sole_creator, environment=environment)


class PerProcessStore:
    """The store that ``connect`` opens, opened again in a forked child."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._opened = {os.getpid(): connect()}  # an inherited client must not even be destroyed
        self.uri = self.inner.uri
        self.atomic_create = self.inner.atomic_create

    @property
    def inner(self) -> Store:
        """The client of this process."""
        pid = os.getpid()
        if pid not in self._opened:
            self._opened[pid] = self._connect()
        return self._opened[pid]

    def put(self, key: str, data: Data) -> None:
        self.inner.put(key, data)

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        self.inner.put_stream(key, make_parts)

    def create(self, key: str, data: Data) -> bool:
        return self.inner.create(key, data)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self.inner.get(key, limit=limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.inner.get_range(key, start, length)

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        return self.inner.list(prefix, limit=limit)

    def list_pages(self, prefix: str) -> Pages:
        return self.inner.list_pages(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)
