"""Reading records, many at a time; and finding the last of a run of numbered objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from diloco.inspection.picture import Unreadable
from diloco.protocol.records import BadRecord, Record
from diloco.store.base import MissingKey, Store

R = TypeVar("R", bound=Record)


@dataclass
class Reader:
    """Reads records, many at a time, and notes those that it cannot."""

    store: Store
    pool: ThreadPoolExecutor
    unreadable: list[Unreadable] = field(default_factory=list)

    def read(self, key: str, kind: type[R]) -> R | None:
        """None where there is no such object, or no such record in it."""
        try:
            return kind.read(self.store, key)
        except MissingKey:
            return None
        except BadRecord as error:
            self.unreadable.append(Unreadable(key=key, reason=str(error)))
            return None

    def read_all(self, wanted: Iterable[str], kind: type[R]) -> list[R | None]:
        return list(self.pool.map(lambda key: self.read(key, kind), wanted))

    def exists(self, key: str) -> bool:
        try:
            self.store.get_range(key, 0, 1)
        except MissingKey:
            return False
        return True


def last_that(exists: Callable[[int], bool], *, hint: int) -> int:
    """The largest n with ``exists(n)``, of a run of numbers from 1; 0 if there is none.

    Gallops from ``hint`` and then halves, so a good guess costs two questions.
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
