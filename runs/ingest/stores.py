"""One open store per location, credential and process; every request ends in bounded time.

Stores are opened after the fork, because object store clients do not survive one, and cached,
because opening costs connections. A run's store uses the run's credential and nothing of the
server's environment. A changed credential creates a new client.

A store client retries for a minute or more, and a folder on a network file system can hang for
ever. Here each request runs in a thread and fails after :data:`RECORD_PATIENCE_S`
(:class:`BoundedStore`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

from diloco.protocol import keys
from diloco.store.base import (
    LISTED,
    Data,
    ListingTooLong,
    LocalStore,
    MakeParts,
    ObjectInfo,
    Pages,
    Store,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from diloco.store.location import BadLocation, canonical
from diloco.store.open import open_store
from runs.backends import parallel_calls
from runs.credentials import DecryptionError
from runs.credentials.vault import unseal
from runs.models import Run

RECORD_PATIENCE_S = 10.0
"""Timeout of a record, a listing or one page of it, and a deletion."""
PART_PATIENCE_S = 120.0
"""Timeout of a request that moves more than ``RECORD_BYTES``."""
RECORD_BYTES = 1 << 20

T = TypeVar("T")


def store_for(run: Run) -> Store:
    """The store of a run. Raises :class:`StoreDenied` if its credential cannot be decrypted."""
    credential = run.store_credential
    if credential is None:
        return _open(os.getpid(), run.rendezvous, "", "")
    return _open(os.getpid(), run.rendezvous, credential.sealed, credential.name)


@lru_cache(maxsize=64)
def _open(pid: int, uri: str, sealed: str, name: str) -> Store:
    """The cache key is the sealed credential, so that no plaintext key stays in memory."""
    try:
        environment = unseal(sealed, name=name) if sealed else None
    except DecryptionError as error:
        raise StoreDenied(str(error)) from None
    try:
        parallel_calls.call(lambda: _check_no_link(uri), place=uri, patience_s=RECORD_PATIENCE_S)
    except parallel_calls.CallTimeout as error:
        raise StoreUnavailable(str(error)) from None
    return BoundedStore(open_store(uri, environment=environment or None))


def _check_no_link(uri: str) -> None:
    """Refuse symbolic links: a run's folder is stored with links resolved, so a new one points
    elsewhere."""
    try:
        expected, actual = canonical(uri, resolve=False), canonical(uri)
    except BadLocation as error:
        raise StoreDenied(str(error)) from None
    if expected != actual:
        raise StoreDenied(f"{uri}: expected a folder, found a symbolic link on the way to it")


def folder_store(store: Store) -> LocalStore | None:
    """The folder store behind ``store``, without timeouts; None for a bucket."""
    inner = store.inner if isinstance(store, BoundedStore) else store
    return inner if isinstance(inner, LocalStore) else None


class RequestTimeout(StoreUnavailable):
    """A request timed out."""


class BoundedStore:
    """A store whose requests raise :class:`StoreUnavailable` on timeout.

    Streams have no timeout: their parts are made in the calling thread.
    """

    def __init__(
        self,
        inner: Store,
        *,
        patience_s: float | None = None,
    ) -> None:
        self.inner = inner
        self.uri, self.atomic_create = inner.uri, inner.atomic_create
        self._patience_s = patience_s

    def with_record_timeout(self) -> BoundedStore:
        """The same store with the record timeout for every request."""
        return BoundedStore(self.inner, patience_s=RECORD_PATIENCE_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, key: str, data: Data) -> None:
        self._bounded(key, lambda: self.inner.put(key, data), len(data))

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        self.inner.put_stream(key, make_parts, size_bytes=size_bytes)

    def create(self, key: str, data: Data) -> bool:
        return self._bounded(key, lambda: self.inner.create(key, data), len(data))

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self._bounded(key, lambda: self.inner.get(key, limit=limit), limit or RECORD_BYTES)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._bounded(key, lambda: self.inner.get_range(key, start, length), length)

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        """List a prefix. Raises :class:`ListingTooLong` also if the listing times out while the
        store answers other requests: that is not a store failure, and other runs use the store."""
        try:
            return self._bounded(prefix, lambda: self.inner.list(prefix, limit=limit), 0)
        except RequestTimeout:
            if not self._answers():
                raise
            patience_s = self._patience_s or RECORD_PATIENCE_S
            raise ListingTooLong(
                prefix,
                f"expected a listing within {patience_s:g} s, found none, while the store answers "
                "other requests",
            ) from None

    def list_pages(self, prefix: str) -> Pages:
        """Each page is one request with its own timeout."""
        pages = self.inner.list_pages(prefix)
        try:
            while (page := self._bounded(prefix, lambda: next(pages, None), 0)) is not None:
                yield page
        except GeneratorExit:
            pages.close()
            raise

    def _answers(self) -> bool:
        """Whether the store answers a minimal request."""
        try:
            self._bounded(keys.OWNER, lambda: self.inner.get_range(keys.OWNER, 0, 1), 0)
        except StoreUnavailable:
            return False
        except StoreError:
            pass
        return True

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        self._bounded("deletion", lambda: self.inner.delete(names), RECORD_BYTES + len(names))

    def _bounded(self, target: str, request: Callable[[], T], size_bytes: int) -> T:
        patience_s = self._patience_s or (
            RECORD_PATIENCE_S if size_bytes <= RECORD_BYTES else PART_PATIENCE_S
        )
        try:
            return parallel_calls.call(request, place=self.uri, patience_s=patience_s)
        except parallel_calls.CallTimeout as error:
            raise RequestTimeout(f"{target}: {error}") from None
