"""Reads records whose bytes can be damaged.

Either the transfer is damaged and the next read is correct, or the object itself is damaged and
every read returns the same wrong bytes. :func:`read_record` distinguishes the two by reading again.
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
"""Failed reads of the same bytes, in a row, after which an object counts as damaged. Reads that
differ were damaged in transfer."""
MOST_READS = 12
"""Maximum number of reads of a record whose reads all fail and differ."""


class ReadAttempts:
    """Counts the failed reads of one object."""

    def __init__(self) -> None:
        self.reads = 0
        self._same = 0
        self._last: bytes | None = None

    def is_settled(self, data: bytes | None) -> bool:
        """Return whether the object itself is damaged: ``data``, the result of the latest read,
        is the result of :data:`READS` reads in a row. None stands for an object beyond the size
        limit."""
        self._same = self._same + 1 if self.reads and data == self._last else 1
        self._last = data
        self.reads += 1
        return self._same >= READS


class Damaged(BadRecord):
    """Every read of the object ``key`` fails its check."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key} is damaged: {reason}")
        self.key = key
        self.reason = reason


def read_record(
    store: Store, key: str, kind: type[R], *, is_right: Callable[[R], bool] = lambda record: True
) -> R:
    """Read the record under ``key``; ``is_right`` checks that the record belongs to that key.

    Raises :class:`~diloco.store.base.MissingKey`; raises :class:`Damaged` after :data:`READS`
    failed reads of the same bytes, or :data:`MOST_READS` failed reads in total.
    """
    doubt = ReadAttempts()
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
        log.warning("%s: %s; reading it again", key, reason)
