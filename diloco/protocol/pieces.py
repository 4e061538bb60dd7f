"""Large objects that are stored in several pieces.

The ranks of a replica write an object of a manifest together: each one stores the part of its bytes
that it holds, as separate objects. In their order they are the bytes of the whole object. The
manifest has their sizes, from which a reader computes the object that has a byte; an object that
one process wrote is its only piece. The parts that have a checksum
(:mod:`diloco.protocol.object_digest`) are those of the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from diloco.protocol import object_digest
from diloco.protocol.records import StoredObject
from diloco.store.base import PART_BYTES, Store


@dataclass(frozen=True)
class Part:
    """Bytes of a whole object from ``at``: those of the object ``key`` from ``start``."""

    key: str
    start: int
    length: int
    at: int

    @property
    def stop(self) -> int:
        """The end in the whole object."""
        return self.at + self.length


def piece_key(key: str, n: int) -> str:
    """Return the key of piece ``n`` of an object; the first one has the key of the object."""
    folder, slash, name = key.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    if not n:
        return key
    return f"{folder}{slash}" + (f"{stem}.{n:05d}.{suffix}" if dot else f"{name}.{n:05d}")


def sizes_of(stored: StoredObject) -> tuple[int, ...]:
    """Return the sizes in bytes of the pieces, in order."""
    return stored.pieces or (stored.size_bytes,)


def keys_of(stored: StoredObject) -> list[str]:
    """Return the keys of the pieces, in order."""
    return [piece_key(stored.key, n) for n in range(len(sizes_of(stored)))]


def part_count(stored: StoredObject) -> int:
    """Return the number of parts that have a checksum."""
    return sum(object_digest.part_count(size) for size in sizes_of(stored))


def parts_of(stored: StoredObject) -> Iterator[Part]:
    """Yield the parts of an object, in order."""
    first = 0
    for key, size in zip(keys_of(stored), sizes_of(stored), strict=True):
        for start in range(0, size, PART_BYTES):
            yield Part(key, start, min(PART_BYTES, size - start), first + start)
        first += size


def ranges(stored: StoredObject, start: int, length: int) -> Iterator[Part]:
    """Yield the ranges of the pieces that have ``length`` bytes from ``start``, in order."""
    first = 0
    for key, size in zip(keys_of(stored), sizes_of(stored), strict=True):
        low, high = max(start, first), min(start + length, first + size)
        if low < high:
            yield Part(key, low - first, high - low, low)
        first += size


def read_range(store: Store, stored: StoredObject, start: int, length: int) -> bytes:
    """Read ``length`` bytes from ``start``, fewer at the end of the object."""
    read = (
        store.get_range(part.key, part.start, part.length) for part in ranges(stored, start, length)
    )
    return b"".join(read)
