"""Packs: telemetry segments that were merged into one object.

A run of 64 replicas writes 370,000 segments a day. So :data:`BLOCK` segments with consecutive
numbers are merged into one object, a *pack*, and deleted (:mod:`diloco.telemetry.compaction`). The
key of a pack follows from the number of a segment, and a pack is complete before the first of its
segments is deleted: a reader that does not find a segment reads the pack.

A pack is the length of its header (4 bytes, big-endian), the header as a record, and the segments'
bytes as they were, one after the other. So a reader checks, limits and refuses each segment as if
it had read that object.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice

from diloco.protocol import keys
from diloco.protocol.reading import READS
from diloco.protocol.record_base import MEBIBYTE, BadRecord, Record
from diloco.store.base import MissingKey, NotAnObject, ObjectTooLarge, Store

log = logging.getLogger(__name__)

BLOCK = 64
"""Segments of a pack: 1 to 64, 65 to 128, and so on. The last pack of a process can have fewer."""
PACK_LIMIT = 16 * MEBIBYTE
"""Bytes of a pack; larger blocks are not packed."""
LENGTH_BYTES = 4
LISTED_PAGES = 100
"""Pages of a listing that :func:`next_segment` reads."""


@dataclass(frozen=True, kw_only=True)
class PackHeader(Record):
    """``sizes`` are the bytes of each segment, the first of which has the number ``first``;
    ``sha256`` is that of all of them together."""

    replica: int
    incarnation: str
    first: int
    sizes: tuple[int, ...]
    sha256: str


def first_of_block(n: int) -> int:
    """Return the number of the first segment in the block of segment ``n``."""
    return (n - 1) // BLOCK * BLOCK + 1


def keys_of_block(replica: int, incarnation: str, first: int) -> list[str]:
    """Return the keys of all objects that a block can have: its pack and its segments."""
    numbers = range(first, first + BLOCK)
    single = [keys.telemetry(replica, incarnation, n) for n in numbers]
    return [pack_key(replica, incarnation, first), *single]


def pack_key(replica: int, incarnation: str, n: int) -> str:
    """Return the key of the pack that has segment ``n``, if there is one."""
    return keys.telemetry_pack(replica, incarnation, first_of_block(n))


def pack(replica: int, incarnation: str, segments: Mapping[int, bytes]) -> bytes:
    """Return the pack of the first segments of a block. Raises :class:`ValueError` for numbers with
    a gap, or of several blocks."""
    first = first_of_block(min(segments))
    numbers = range(first, first + len(segments))
    if len(segments) > BLOCK or set(numbers) != segments.keys():
        raise ValueError(
            f"expected the first segments of the block from {first} on, found {sorted(segments)}"
        )
    body = b"".join(segments[n] for n in numbers)
    header = PackHeader(
        replica=replica,
        incarnation=incarnation,
        first=first,
        sizes=tuple(len(segments[n]) for n in numbers),
        sha256=hashlib.sha256(body).hexdigest(),
    ).to_bytes()
    return len(header).to_bytes(LENGTH_BYTES, "big") + header + body


def unpack(data: bytes, replica: int, incarnation: str, first: int) -> dict[int, bytes]:
    """Return the segments of a pack by number. Raises :class:`BadRecord`."""
    length = int.from_bytes(data[:LENGTH_BYTES], "big")
    if not 0 < length <= PackHeader.LIMIT:
        raise BadRecord(f"expected a header of 1 to {PackHeader.LIMIT} bytes, found {length}")
    header = PackHeader.from_bytes(data[LENGTH_BYTES : LENGTH_BYTES + length])
    found = (header.replica, header.incarnation, header.first)
    if found != (replica, incarnation, first):
        raise BadRecord(f"expected the pack {(replica, incarnation, first)}, found {found}")
    body = memoryview(data)[LENGTH_BYTES + length :]
    sizes = header.sizes
    if not 0 < len(sizes) <= BLOCK or min(sizes) < 0 or sum(sizes) != len(body):
        raise BadRecord(f"expected a pack of 1 to {BLOCK} segments, found other sizes")
    if hashlib.sha256(body).hexdigest() != header.sha256:
        raise BadRecord("expected the digest of the pack, found another")
    segments, start = {}, 0
    for n, size in enumerate(sizes, start=first):
        segments[n] = bytes(body[start : start + size])
        start += size
    return segments


def read_pack(store: Store, replica: int, incarnation: str, n: int) -> dict[int, bytes]:
    """Return the segments of the pack that has segment ``n``; empty if there is no pack.

    Raises :class:`BadRecord` if :data:`~diloco.protocol.reading.READS` reads fail their check.
    """
    key, first = pack_key(replica, incarnation, n), first_of_block(n)
    error = BadRecord("never raised")
    for _ in range(READS):
        try:
            return unpack(store.get(key, limit=PACK_LIMIT), replica, incarnation, first)
        except MissingKey:
            return {}
        except (BadRecord, NotAnObject, ObjectTooLarge) as found:
            error = BadRecord(f"{key}: {found}")
            log.warning("%s; reading it again", error)
    raise error


def next_segment(store: Store, replica: int, incarnation: str, n: int) -> int:
    """Return the smallest number from ``n`` on that a listing has, alone or as the first of a pack;
    0 without one. Old segments are deleted, so the numbers of a process can begin later than at 1.
    """
    pages = islice(store.list_pages(keys.telemetry_dir(replica, incarnation)), LISTED_PAGES)
    names = (info.key for info in chain.from_iterable(pages))
    parsed = (keys.parse_telemetry(name) or keys.parse_telemetry_pack(name) for name in names)
    return min((name[2] for name in parsed if name and name[2] >= n), default=0)
