"""Reading records that may arrive damaged.

A read can be damaged on its way, and then the next one is right; or the object itself is, and then
every read is wrong, and the same. :func:`read_record` tells the two apart by reading again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from diloco.protocol.records import BadRecord, Record
from diloco.store.base import NotAnObject, ObjectTooLarge, Store

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)

READS = 3
"""How often an object that fails its check is read before it counts as damaged. Of a record these
are reads of the same bytes, one after another: reads that differ were damaged on their way."""
MOST_READS = 12
"""How often a record is read whose reads all fail their check and differ."""


class Doubt:
    """Counts the reads of one object that failed their check."""

    def __init__(self) -> None:
        self.reads = 0
        self._same = 0
        self._last: bytes | None = None

    def is_settled(self, data: bytes | None) -> bool:
        """Whether the object itself is wrong: ``data``, which was just read, was read
        :data:`READS` times in a row. None stands for an object that is too large to be read."""
        self._same = self._same + 1 if self.reads and data == self._last else 1
        self._last = data
        self.reads += 1
        return self._same >= READS


class Damaged(BadRecord):
    """An object fails its check however often it is read; ``key`` names it."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key} is damaged: {reason}")
        self.key = key
        self.reason = reason


def read_record(
    store: Store, key: str, kind: type[R], *, is_right: Callable[[R], bool] = lambda record: True
) -> R:
    """The record under ``key``; ``is_right`` says whether it belongs there.

    Raises :class:`~diloco.store.base.MissingKey`, and :class:`Damaged` when :data:`READS`
    reads in a row give the same bytes, or :data:`MOST_READS` give any, and no record that belongs
    there.
    """
    doubt = Doubt()
    while True:
        data: bytes | None = None
        try:
            data = store.get(key, limit=kind.LIMIT)
            record = kind.from_bytes(data)
        except (ObjectTooLarge, NotAnObject) as error:
            reason = f"{kind.__name__}: {error}"
        except BadRecord as error:
            reason = str(error)
        else:
            if is_right(record):
                return record
            reason = f"expected the {kind.__name__} of this key, found another's"
        if doubt.is_settled(data) or doubt.reads >= MOST_READS:
            raise Damaged(key, reason)
        log.warning("%s: %s; it is read again", key, reason)
