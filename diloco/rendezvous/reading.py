"""Reading records that may arrive damaged.

A read can be damaged on its way, and then the next one is right; or the object itself is, and then
every read is wrong. :func:`read_record` tells the two apart by reading again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from diloco.rendezvous.records import BadRecord, Record
from diloco.rendezvous.store import Store

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)

READS = 3
"""How often an object that fails its check is read before it counts as damaged."""


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

    Raises :class:`~diloco.rendezvous.store.MissingKey`, and :class:`Damaged` when no read of
    :data:`READS` is a record that belongs there.
    """
    reason = ""
    for _ in range(READS):
        try:
            record = kind.read(store, key)
        except BadRecord as error:
            reason = str(error)
        else:
            if is_right(record):
                return record
            reason = f"expected the {kind.__name__} of this key, found another's"
        log.warning("%s: %s; it is read again", key, reason)
    raise Damaged(key, reason)
