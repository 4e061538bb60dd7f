"""Large objects of a rendezvous, a piece at a time: for downloads and exports.

A checkpoint may be larger than this process' memory, so it is never read whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import BinaryIO

from diloco.rendezvous.store import Store

PIECE_BYTES = 8 * 1024 * 1024


class NotWhatItWas(Exception):
    """An object whose size or digest is another than its manifest says."""


def pieces(store: Store, key: str, size_bytes: int) -> Iterator[bytes]:
    """All of an object that should have ``size_bytes``. Raises :class:`NotWhatItWas` where it ends
    before, and :class:`MissingKey` where it has been swept; the first piece is read at once."""
    first = store.get_range(key, 0, min(PIECE_BYTES, max(size_bytes, 1)))

    def rest() -> Iterator[bytes]:
        read, piece = 0, first
        while piece:
            read += len(piece)
            yield piece
            if read >= size_bytes:
                break
            piece = store.get_range(key, read, min(PIECE_BYTES, size_bytes - read))
        if read != size_bytes:
            raise NotWhatItWas(f"{key}: expected {size_bytes} bytes, found {read}")

    return rest()


def fetch(store: Store, key: str, file: BinaryIO, *, size_bytes: int, sha256: str) -> None:
    """Write an object to ``file``. Raises :class:`NotWhatItWas` if it is not what it should be."""
    digest = hashlib.sha256()
    for piece in pieces(store, key, size_bytes):
        digest.update(piece)
        file.write(piece)
    if digest.hexdigest() != sha256:
        raise NotWhatItWas(f"{key}: expected sha256 {sha256}, found {digest.hexdigest()}")
