"""A store that retries with jittered exponential backoff until a deadline; the last attempt is made
at the deadline.

:class:`~diloco.store.base.StoreUnavailable` is retried; errors that waiting cannot fix are raised
at once. A :class:`~diloco.store.base.StoreDenied` is one or the other. Until this store has
permitted an operation of the same kind (read, list, write), the credential or the URI is wrong and
the error is raised at once. Afterwards a policy or a credential has changed, perhaps temporarily:
the operation is retried, and at the deadline the error is raised as
:class:`~diloco.store.base.StoreUnavailable`, because a new process with fresh credentials can
succeed.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from diloco.clock import Clock
from diloco.store.base import (
    LISTED,
    ListingTooLong,
    MissingKey,
    NotAnObject,
    ObjectInfo,
    ObjectTooLarge,
    Pages,
    Store,
    StoreDenied,
    StoreUnavailable,
)
from diloco.store.multipart import Data, MakeParts

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0

READ, LIST, WRITE = "read", "list", "write"
"""Kinds of operation that a bucket's policy permits or denies; a deletion counts as a write."""
RUN_HAS_TRAINED = "DILOCO_RUN_HAS_TRAINED"
"""Environment variable that a launcher sets when the run has trained before. Its credential was
permitted every operation then, so a denial is an outage from the start."""


def permitted_before() -> set[str]:
    """Return the kinds of operation that earlier processes of this run were permitted."""
    return {READ, LIST, WRITE} if os.environ.get(RUN_HAS_TRAINED) == "1" else set()


class _Progress:
    """``at_s``: the start of an operation, or when its newest part was taken that no earlier
    attempt had reached."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reached = 0
        self.at_s = clock.monotonic()

    def counted(self, parts: Iterable[Data]) -> Iterator[Data]:
        """Yield ``parts`` and note progress."""
        for count, part in enumerate(parts, start=1):
            if count > self._reached:
                self._reached, self.at_s = count, self._clock.monotonic()
            yield part


class RetryingStore:
    """Retries each operation of ``inner`` for up to ``deadline_s`` seconds. Safe for use by several
    threads.

    ``permitted`` holds the kinds of operation that the store has permitted this process or earlier
    processes of the run (:func:`permitted_before`). Several wrappers of one store share it.
    """

    def __init__(
        self,
        inner: Store,
        *,
        clock: Clock,
        rng: random.Random,
        deadline_s: float,
        permitted: set[str] | None = None,
    ) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.atomic_create = inner.atomic_create
        self._clock = clock
        self._rng = rng
        self._deadline_s = deadline_s
        self.permitted = permitted_before() if permitted is None else permitted

    def _try(
        self,
        request: str,
        kind: str,
        operation: Callable[[], T],
        progress: _Progress | None = None,
    ) -> T:
        progress = progress or _Progress(self._clock)
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                result = operation()
            except (MissingKey, ObjectTooLarge, ListingTooLong, NotAnObject):
                self.permitted.add(kind)
                raise
            except (StoreUnavailable, StoreDenied) as error:
                denied = isinstance(error, StoreDenied)
                if denied and kind not in self.permitted:
                    raise
                left_s = progress.at_s + self._deadline_s - self._clock.monotonic()
                if left_s <= 0 and denied:
                    raise StoreUnavailable(
                        f"{request}: denied for {self._deadline_s:g} s, though it was permitted "
                        f"before: {error}"
                    ) from error
                if left_s <= 0:
                    raise
                wait_s = min(left_s, pause_s * self._rng.uniform(0.5, 1.5))
                log.warning("%s failed, retrying in %.1f s: %s", request, wait_s, error)
                self._clock.sleep(wait_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            else:
                self.permitted.add(kind)
                return result

    def put(self, key: str, data: Data) -> None:
        self._try(f"put {key}", WRITE, lambda: self.inner.put(key, data))

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        """Each attempt calls ``make_parts``, which must yield the same parts again. The deadline
        counts from the newest part that no earlier attempt had reached, so that an upload which
        takes longer than the deadline is retried too."""
        progress = _Progress(self._clock)
        self._try(
            f"put {key}",
            WRITE,
            lambda: self.inner.put_stream(
                key, lambda: progress.counted(make_parts()), size_bytes=size_bytes
            ),
            progress,
        )

    def create(self, key: str, data: Data) -> bool:
        """Create the object. A retry that meets the object of a first attempt whose response was
        lost counts as success, so bodies must name their writer."""
        if self._try(f"create {key}", WRITE, lambda: self.inner.create(key, data)):
            return True
        try:
            return self.get(key, limit=len(data)) == bytes(data)
        except (MissingKey, ObjectTooLarge, NotAnObject):
            return False

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self._try(f"get {key}", READ, lambda: self.inner.get(key, limit=limit))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return no bytes for something that is not an object: readers that check digests handle it
        as damaged."""
        try:
            return self._try(f"get {key}", READ, lambda: self.inner.get_range(key, start, length))
        except NotAnObject as error:
            log.warning("%s", error)
            return b""

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        return self._try(f"list {prefix}", LIST, lambda: self.inner.list(prefix, limit=limit))

    def list_pages(self, prefix: str) -> Pages:
        """Not retried: a listing has to start again after a failed page."""
        return self.inner.list_pages(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        names = [*keys]
        self._try("delete", WRITE, lambda: self.inner.delete(names))
