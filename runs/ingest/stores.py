"""One open store per rendezvous, credential and process, whose requests end in bounded time.

Opened after the fork, because clients of object stores do not survive one, and kept, because each
opening costs connections. A run's credential opens it and nothing of the server's own environment
does; a credential that was changed makes a new client.

A store's own client is patient: it tries again, for a minute and more, and a folder of a network
file system can hang for ever. Here each request runs in a thread and counts as unanswered after
:data:`RECORD_PATIENCE_S` (:class:`BoundedStore`).
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
from runs.credentials import CannotOpen
from runs.credentials.vault import unseal
from runs.models import Run

RECORD_PATIENCE_S = 10.0
"""For a record, a listing or a page of one, a deletion."""
PART_PATIENCE_S = 120.0
"""For a request that moves more than ``RECORD_BYTES``."""
RECORD_BYTES = 1 << 20

T = TypeVar("T")


def store_for(run: Run) -> Store:
    """Raises :class:`StoreDenied` where the run's credential cannot be opened."""
    credential = run.store_credential
    if credential is None:
        return _open(os.getpid(), run.rendezvous, "", "")
    return _open(os.getpid(), run.rendezvous, credential.sealed, credential.name)


@lru_cache(maxsize=64)
def _open(pid: int, uri: str, sealed: str, name: str) -> Store:
    """Kept by what is sealed, not by what is in it: these keys are in memory for long."""
    try:
        environment = unseal(sealed, name=name) if sealed else None
    except CannotOpen as error:
        raise StoreDenied(str(error)) from None
    try:
        parallel_calls.call(lambda: _check_no_link(uri), place=uri, patience_s=RECORD_PATIENCE_S)
    except parallel_calls.NoAnswer as error:
        raise StoreUnavailable(str(error)) from None
    return BoundedStore(open_store(uri, environment=environment or None))


def _check_no_link(uri: str) -> None:
    """A run's folder is stored with links resolved: one that is there now leads elsewhere."""
    try:
        wanted, found = canonical(uri, resolve=False), canonical(uri)
    except BadLocation as error:
        raise StoreDenied(str(error)) from None
    if wanted != found:
        raise StoreDenied(f"{uri}: expected a folder, found a symbolic link on the way to it")


def folder_store(store: Store) -> LocalStore | None:
    """The store of a folder, without what bounds its requests; None for a bucket."""
    inner = store.inner if isinstance(store, BoundedStore) else store
    return inner if isinstance(inner, LocalStore) else None


class Unanswered(StoreUnavailable):
    """A request was not answered in time."""


class BoundedStore:
    """A store whose requests raise :class:`StoreUnavailable` when they take too long.

    Streams are passed on as they are: their parts are made in the calling thread.
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

    def impatient(self) -> BoundedStore:
        """The same store, with the patience of a record for every request."""
        return BoundedStore(self.inner, patience_s=RECORD_PATIENCE_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, key: str, data: Data) -> None:
        self._bounded(key, lambda: self.inner.put(key, data), len(data))

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        self.inner.put_stream(key, make_parts)

    def create(self, key: str, data: Data) -> bool:
        return self._bounded(key, lambda: self.inner.create(key, data), len(data))

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self._bounded(key, lambda: self.inner.get(key, limit=limit), limit or RECORD_BYTES)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._bounded(key, lambda: self.inner.get_range(key, start, length), length)

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        """Raises :class:`ListingTooLong` also where a listing has no end in time although the
        store answers: that is no failure of the store, which other runs use too."""
        try:
            return self._bounded(prefix, lambda: self.inner.list(prefix, limit=limit), 0)
        except Unanswered:
            if not self._answers():
                raise
            patience_s = self._patience_s or RECORD_PATIENCE_S
            raise ListingTooLong(
                prefix,
                f"expected a listing within {patience_s:g} s, found none, while the store answers "
                "other requests",
            ) from None

    def list_pages(self, prefix: str) -> Pages:
        """Each page is a request with a patience of its own."""
        pages = self.inner.list_pages(prefix)
        try:
            while (page := self._bounded(prefix, lambda: next(pages, None), 0)) is not None:
                yield page
        except GeneratorExit:
            pages.close()
            raise

    def _answers(self) -> bool:
        """Whether the store answers the smallest request."""
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

    def _bounded(self, what: str, request: Callable[[], T], size_bytes: int) -> T:
        patience_s = self._patience_s or (
            RECORD_PATIENCE_S if size_bytes <= RECORD_BYTES else PART_PATIENCE_S
        )
        try:
            return parallel_calls.call(request, place=self.uri, patience_s=patience_s)
        except parallel_calls.NoAnswer as error:
            raise Unanswered(f"{what}: {error}") from None
