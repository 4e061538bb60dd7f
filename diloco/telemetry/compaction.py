"""Merges old telemetry segments of a replica into packs, and deletes the oldest packs.

A process packs its own segments, a block later than they are written, so that a server that follows
the run reads single segments. The segments of earlier processes of the replica, which can have been
killed at any time, are packed when a new process starts.

Order: write the pack, read it back, delete the segments. A crash leaves segments beside their pack,
which have the same bytes; the next process deletes them. A damaged, missing or too large segment
leaves its block as it is.

A replica keeps the newest ``telemetry_packs`` blocks, whichever of its processes wrote them. Older
ones are deleted with all that is left of them, packed or not.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection

from diloco.protocol import keys
from diloco.protocol.packed_telemetry import (
    BLOCK,
    LENGTH_BYTES,
    PACK_LIMIT,
    PackHeader,
    first_of_block,
    keys_of_block,
    pack,
    pack_key,
    read_pack,
)
from diloco.protocol.record_base import BadRecord, unsealed
from diloco.protocol.records import Identity
from diloco.protocol.telemetry import Segment
from diloco.store.base import MissingKey, NotAnObject, ObjectTooLarge, Store

log = logging.getLogger(__name__)

DELETED_AT_ONCE = 15
"""Blocks that one call deletes: each has a pack and 64 segments at most, and a request deletes a
thousand objects."""

Block = tuple[str, Collection[int]]
"""Incarnation, and numbers of segments in one block."""


class Compaction:
    """Packs the segments of one process, and those of earlier processes of its replica: one block
    with each call of :meth:`run`, which is called after each new segment. ``is_over`` interrupts a
    call when the process ends. ``packs_kept`` is the number of blocks that are not deleted; 0: all.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        is_over: Callable[[], bool],
        packs_kept: int = 0,
    ) -> None:
        self._store = store
        self._identity = identity
        self._is_over = is_over
        self._packs_kept = packs_kept
        self._blocks: list[tuple[str, int]] = []
        """Incarnation and first segment of each block of this replica that is full or of an earlier
        process, oldest first."""
        self._next = 1
        """First segment of the next block of this process."""
        self._earlier: deque[Block] | None = None

    def run(self, written: int) -> None:
        """Pack one block, if one is due after segment ``written``. Raises
        :class:`~diloco.store.base.StoreError`; the next call repeats the block."""
        if self._earlier is None:
            self._earlier = deque(self._blocks_of_earlier_processes())
        if self._next + 2 * BLOCK <= written + 1:
            self._pack((self._identity.incarnation, range(self._next, self._next + BLOCK)))
            self._blocks.append((self._identity.incarnation, self._next))
            self._next += BLOCK
        elif self._earlier:
            self._pack(self._earlier[0])
            self._earlier.popleft()
        self._delete_old()

    def _pack(self, block: Block) -> None:
        incarnation, numbers = block
        pack_block(self._store, self._identity.replica, incarnation, numbers, is_over=self._is_over)

    def _blocks_of_earlier_processes(self) -> list[Block]:
        replica, own = self._identity.replica, self._identity.incarnation
        single: dict[tuple[str, int], list[int]] = defaultdict(list)
        packed: set[tuple[str, int]] = set()
        for info in self._store.list(keys.telemetry_of(replica)):
            if (parsed := keys.parse_telemetry_pack(info.key)) and parsed[1] < own:
                if parsed[2] == first_of_block(parsed[2]):  # otherwise no replica wrote it
                    packed.add(parsed[1:])
            elif (parsed := keys.parse_telemetry(info.key)) and parsed[1] < own:
                single[parsed[1], first_of_block(parsed[2])].append(parsed[2])
        self._blocks = sorted(packed | single.keys())
        return [(incarnation, numbers) for (incarnation, _), numbers in sorted(single.items())]

    def _delete_old(self) -> None:
        """Delete the oldest blocks beyond those that are kept, some of them."""
        surplus = len(self._blocks) - self._packs_kept if self._packs_kept else 0
        obsolete = self._blocks[: max(0, min(surplus, DELETED_AT_ONCE))]
        if not obsolete or self._is_over():
            return
        replica = self._identity.replica
        self._store.delete([key for block in obsolete for key in keys_of_block(replica, *block)])
        del self._blocks[: len(obsolete)]
        self._earlier = deque(
            (incarnation, numbers)
            for incarnation, numbers in self._earlier or ()
            if (incarnation, first_of_block(min(numbers))) not in obsolete
        )


def pack_block(
    store: Store,
    replica: int,
    incarnation: str,
    numbers: Collection[int],
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Replace the segments ``numbers`` of one block by a pack; return whether it was possible.

    A segment that is missing, because a listing was old, has to be in the pack.
    """
    key = pack_key(replica, incarnation, min(numbers))
    try:
        packed = read_pack(store, replica, incarnation, min(numbers))
        single = _read(store, replica, incarnation, numbers, packed, is_over)
    except (BadRecord, MissingKey, NotAnObject, ObjectTooLarge) as error:
        log.warning("telemetry is not packed: %s", error)
        return False
    if is_over() or not single:
        return False
    if any(packed.get(n, data) != data for n, data in single.items()):
        log.error("%s differs from the segments beside it; they are kept", key)
        return False
    if single.keys() - packed.keys():
        try:
            data = pack(replica, incarnation, {**packed, **single})
        except ValueError as error:
            log.warning("telemetry is not packed: %s", error)
            return False
        store.put(key, data)
        if store.get(key, limit=PACK_LIMIT) != data:
            log.warning("%s was damaged in transit; its segments are kept", key)
            return False
    store.delete([keys.telemetry(replica, incarnation, n) for n in sorted(single)])
    return True


def _read(
    store: Store,
    replica: int,
    incarnation: str,
    numbers: Collection[int],
    packed: Collection[int],
    is_over: Callable[[], bool],
) -> dict[int, bytes]:
    """Return the bytes of the segments beside a pack of others, with their checksums verified."""
    segments: dict[int, bytes] = {}
    room = PACK_LIMIT - PackHeader.LIMIT - LENGTH_BYTES
    for n in sorted(numbers):
        if is_over():
            return {}
        key = keys.telemetry(replica, incarnation, n)
        try:
            segments[n] = store.get(key, limit=min(Segment.LIMIT, room))
        except MissingKey:
            if n not in packed:
                raise
            continue
        unsealed(segments[n], key)
        room -= len(segments[n])
    return segments
