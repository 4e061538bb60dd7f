"""Opens a bucket with the fastest client that serves it, once per process.

S3 uses obstore where it is installed and its threads are alive. Everything else, and S3 in a
process forked from one that has used obstore, uses fsspec. A client inherited across a fork is
never used: s3fs raises and obstore hangs, so the child process opens a new one on first use.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

from diloco.store.base import Store
from diloco.store.fsspec import FsspecStore

_BY_OBSTORE = frozenset({"s3", "s3a"})


def open_remote(
    uri: str, *, coordinator: bool = False, environment: Mapping[str, str] | None = None
) -> Store:
    """Open a bucket; the arguments are those of :func:`diloco.store.open.open_store`."""
    connect = partial(_connect, uri, coordinator=coordinator, environment=environment)
    return cast(Store, PerProcessStore(connect))


def _connect(uri: str, *, coordinator: bool, environment: Mapping[str, str] | None) -> Store:
    installed = importlib.util.find_spec("obstore") and importlib.util.find_spec("botocore")
    if urlsplit(uri).scheme in _BY_OBSTORE and installed:
        from diloco.store import s3

        understood = environment is not None or s3.understands_options()
        if s3.usable() and understood:
            return s3.ObstoreStore(uri, environment=environment)
    return FsspecStore(uri, coordinator=coordinator, environment=environment)


class PerProcessStore:
    """A store that a forked child opens again by calling ``connect``. Every attribute and operation
    is that of the client of the calling process."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._opened = {os.getpid(): connect()}  # keep inherited clients: destroying one can hang

    @property
    def inner(self) -> Store:
        """The client of this process."""
        pid = os.getpid()
        if pid not in self._opened:
            self._opened[pid] = self._connect()
        return self._opened[pid]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
