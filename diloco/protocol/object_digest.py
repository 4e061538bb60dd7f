"""Checksums of the parts of a large object, and digests over all of it.

Each part of :data:`~diloco.store.base.PART_BYTES` has a checksum (xxh3_64, 16 hex digits; against
damage, not against attacks). So a reader can verify each ranged read by itself, and a writer
computes them while it uploads. The *digest* of an object with checksums is the sha256 of their
text. Objects for other programs have a plain sha256 too, which ``sha256sum`` computes.
"""

from __future__ import annotations

import hashlib
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


class ObjectDigest:
    """Computes the checksums, and with ``sha256`` also that, of bytes that arrive in pieces of any
    size."""

    def __init__(self, *, sha256: bool = True) -> None:
        self.size_bytes = 0
        self._sha256 = hashlib.sha256() if sha256 else None
        self._checksums: list[str] = []
        self._part = _hash_of(b"")

    def update(self, data: Data) -> None:
        """Add the next piece."""
        view = memoryview(data)
        if self._sha256 is not None:
            self._sha256.update(view)
        while len(view):
            left = PART_BYTES - self.size_bytes % PART_BYTES
            self._part.update(view[:left])
            self.size_bytes += min(left, len(view))
            if self.size_bytes % PART_BYTES == 0:
                self._checksums.append(self._part.hexdigest())
                self._part = _hash_of(b"")
            view = view[left:]

    @property
    def checksums(self) -> str:
        """The checksums of all parts; the last part ends with the last piece."""
        last = [self._part.hexdigest()] if self.size_bytes % PART_BYTES else []
        return "".join(self._checksums + last)

    @property
    def sha256(self) -> str:
        """The sha256 in hex, '' if it is not computed."""
        return self._sha256.hexdigest() if self._sha256 is not None else ""

    def matches(self, digest: str) -> bool:
        """Return whether ``digest`` is that of the checksums, or the sha256."""
        return bool(digest) and digest in (digest_of(self.checksums), self.sha256)
