"""A store that tries again: jittered exponential backoff inside a deadline. The last try is made
at the deadline.

:class:`~diloco.store.base.StoreUnavailable` is tried again; what cannot get better by waiting
is raised at once. A denial is one or the other: before this store has permitted an operation of the
same kind (read, list, write), the credential or the URI is wrong, and the denial is raised at once.
Afterwards a policy or a credential has changed, perhaps for a while: it is tried again, and at the
deadline raised as :class:`~diloco.store.base.StoreUnavailable`, because a new process with
fresh credentials may be permitted.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from diloco.clock import Clock
from diloco.store.base import (
    LISTED,
    Data,
    ListingTooLong,
    MakeParts,
    MissingKey,
    NotAnObject,
    ObjectInfo,
    ObjectTooLarge,
    Pages,
    Store,
    StoreDenied,
    StoreUnavailable,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0

READ, LIST, WRITE = "read", "list", "write"
"""Kinds of operation that a bucket's policy permits or denies. Deleting is writing."""
RUN_HAS_TRAINED = "DILOCO_RUN_HAS_TRAINED"
"""Environment variable of a process whose launcher knows that the run has trained before: then its
credential was permitted everything, and a denial is an outage from the start."""


def permitted_before(environment: Mapping[str, str] | None = None) -> set[str]:
    """The kinds of operation that earlier processes of this run were permitted, as far as this
    one's environment says."""
    found = os.environ if environment is None else environment
    return {READ, LIST, WRITE} if found.get(RUN_HAS_TRAINED) == "1" else set()


class RetryingStore:
    """Wraps a store; each operation is tried for up to ``deadline_s`` seconds, by any thread.

    ``permitted`` has the kinds of operation that the store has permitted this process, or earlier
    ones of the run (:func:`permitted_before`); those who wrap one store more than once share it.
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

    def _try(self, what: str, kind: str, operation: Callable[[], T]) -> T:
        give_up_s = self._clock.monotonic() + self._deadline_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                answer = operation()
            except (MissingKey, ObjectTooLarge, ListingTooLong, NotAnObject):
                self.permitted.add(kind)
                raise
            except (StoreUnavailable, StoreDenied) as error:
                denied = isinstance(error, StoreDenied)
                if denied and kind not in self.permitted:
                    raise
                left_s = give_up_s - self._clock.monotonic()
                if left_s <= 0 and denied:
                    raise StoreUnavailable(
                        f"{what}: denied for {self._deadline_s:g} s, though it was permitted "
                        f"before: {error}"
                    ) from error
                if left_s <= 0:
                    raise
                wait_s = min(left_s, pause_s * self._rng.uniform(0.5, 1.5))
                log.warning("%s failed, trying again in %.1f s: %s", what, wait_s, error)
                self._clock.sleep(wait_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            else:
                self.permitted.add(kind)
                return answer

    def put(self, key: str, data: Data) -> None:
        self._try(f"put {key}", WRITE, lambda: self.inner.put(key, data))

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        """Each try asks for the parts anew; ``make_parts`` must give the same ones again."""
        self._try(f"put {key}", WRITE, lambda: self.inner.put_stream(key, make_parts))

    def create(self, key: str, data: Data) -> bool:
        """As the store's own; a create that met its own object, because the answer to the first
        try was lost, counts as won. Bodies must name their writer."""
        if self._try(f"create {key}", WRITE, lambda: self.inner.create(key, data)):
            return True
        try:
            return self.get(key, limit=len(data)) == bytes(data)
        except (MissingKey, ObjectTooLarge, NotAnObject):
            return False

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self._try(f"get {key}", READ, lambda: self.inner.get(key, limit=limit))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """No bytes of what is no object: to a reader that checks digests it is a damaged one."""
        try:
            return self._try(f"get {key}", READ, lambda: self.inner.get_range(key, start, length))
        except NotAnObject as error:
            log.warning("%s", error)
            return b""

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        return self._try(f"list {prefix}", LIST, lambda: self.inner.list(prefix, limit=limit))

    def list_pages(self, prefix: str) -> Pages:
        """A page that cannot be read is not tried again: its listing has to begin anew."""
        return self.inner.list_pages(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        names = [*keys]
        self._try("delete", WRITE, lambda: self.inner.delete(names))
