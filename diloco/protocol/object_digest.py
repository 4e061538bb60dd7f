"""Checksums of the parts of a large object, and digests over all of it.

Each part of :data:`~diloco.store.base.PART_BYTES` has a checksum (xxh3_64, 16 hex digits; against
damage, not against attacks). So a reader can verify each ranged read by itself, and a writer
computes them while it uploads. The *digest* of an object with checksums is the sha256 of their
text. Objects for other programs have a plain sha256 too, which ``sha256sum`` computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from diloco.store.base import PART_BYTES
from diloco.store.multipart import Data

CHECKSUM_DIGITS = 16


def checksum_of(part: Data) -> str:
    """Return the checksum of a part: 16 hex digits."""
    return str(_hash_of(part).hexdigest())


def _hash_of(data: Data) -> Any:
    import xxhash  # not at import: records are parsed where it is not installed

    return xxhash.xxh3_64(data)


def digest_of(checksums: str) -> str:
    """Return the digest of an object whose parts have these checksums."""
    return hashlib.sha256(checksums.encode(errors="replace")).hexdigest()


def part_count(size_bytes: int) -> int:
    """Return the number of parts of an object."""
    return -(-size_bytes // PART_BYTES)


def _part_sizes(pieces: Iterable[int]) -> Iterator[int]:
    """Yield the sizes of the parts of pieces, and of a last piece of any size."""
    for size in pieces:
        yield from repeat(PART_BYTES, size // PART_BYTES)
        if size % PART_BYTES:
            yield size % PART_BYTES
    yield from repeat(PART_BYTES)


class ObjectDigest:
    """Computes the checksums, and with ``sha256`` also that, of bytes that arrive in blocks of any
    size. A part ends with each of ``pieces`` (sizes in bytes)."""

    def __init__(self, *, sha256: bool = True, pieces: Iterable[int] = ()) -> None:
        self.size_bytes = 0
        self._sha256 = hashlib.sha256() if sha256 else None
        self._checksums: list[str] = []
        self._sizes = _part_sizes(pieces)
        self._part, self._left, self._is_empty = _hash_of(b""), next(self._sizes), True

    def update(self, data: Data) -> None:
        """Add the next block."""
        view = memoryview(data)
        if self._sha256 is not None:
            self._sha256.update(view)
        while len(view):
            block = view[: self._left]
            self._part.update(block)
            self.size_bytes += len(block)
            self._left -= len(block)
            self._is_empty = self._left == 0
            if self._is_empty:
                self._checksums.append(self._part.hexdigest())
                self._part, self._left = _hash_of(b""), next(self._sizes)
            view = view[len(block) :]

    @property
    def checksums(self) -> str:
        """The checksums of all parts; the last part ends with the last block."""
        last = [] if self._is_empty else [self._part.hexdigest()]
        return "".join(self._checksums + last)

    @property
    def sha256(self) -> str:
        """The sha256 in hex, '' if it is not computed."""
        return self._sha256.hexdigest() if self._sha256 is not None else ""

    def matches(self, digest: str) -> bool:
        """Return whether ``digest`` is that of the checksums, or the sha256."""
        return bool(digest) and digest in (digest_of(self.checksums), self.sha256)
