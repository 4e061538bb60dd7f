"""Streams large objects of a bucket in pieces, for downloads and exports.

A checkpoint can be larger than this process's memory. Its digest is compared with the manifest
before the last piece is passed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from diloco.protocol import keys
from diloco.protocol.object_digest import ObjectDigest
from diloco.store.base import Store
from runs.ingest.stores import folder_store
from runs.models import Checkpoint

PIECE_BYTES = 8 * 1024 * 1024
READ_TWICE_BYTES = 1 << 30
"""Objects in a folder up to this size are verified before the first byte is sent; this takes about
a second."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DigestMismatch(Exception):
    """An object's size or digest differs from its manifest."""


def pieces(store: Store, key: str, size_bytes: int) -> Iterator[bytes]:
    """Iterate over an object of ``size_bytes``. The first piece is read immediately.

    Raises :class:`DigestMismatch` if the object is shorter, :class:`MissingKey` if it was deleted.
    """
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
            raise DigestMismatch(f"{key}: expected {size_bytes} bytes, found {read}")

    return rest()


def check_named(checkpoint: Checkpoint) -> None:
    """Raise :class:`DigestMismatch` unless the row names this checkpoint's weights and a digest."""
    key = checkpoint.key
    own = (
        keys.is_final_weights(key)
        if checkpoint.final
        else keys.is_weights_of(key, checkpoint.round)
    )
    if not own:
        raise DigestMismatch(
            f"expected a manifest that names the weights of {checkpoint}, found {key!r}"
        )
    if not _DIGEST.fullmatch(checkpoint.digest):
        raise DigestMismatch(
            f"{key}: expected a manifest with a digest, found {checkpoint.digest!r}"
        )


def verified_pieces(store: Store, checkpoint: Checkpoint) -> Iterator[bytes]:
    """Iterate over the weights of a checkpoint and verify them.

    Raises :class:`DigestMismatch` if they differ from the manifest. Folders and small objects are
    verified before the first piece is returned. Otherwise the error replaces the last piece, so
    that a client cannot mistake an incomplete download for a complete one.
    """
    check_named(checkpoint)
    key, size_bytes, digest = checkpoint.key, checkpoint.size_bytes, checkpoint.digest
    if folder_store(store) is not None and size_bytes <= READ_TWICE_BYTES:
        for _ in _verified(pieces(store, key, size_bytes), key, digest):
            pass
    checked = _verified(pieces(store, key, size_bytes), key, digest)
    first = next(checked)  # an object of one piece is fully verified here
    return chain([first], checked)


def _verified(source: Iterator[bytes], key: str, digest: str) -> Iterator[bytes]:
    """Delay each piece until the next one is read, and the last one until the digest is
    verified."""
    found, held = ObjectDigest(), b""
    for piece in source:
        if held:
            yield held
        found.update(piece)
        held = piece
    if not found.matches(digest):
        raise DigestMismatch(f"{key}: expected the digest {digest}, found sha256 {found.sha256}")
    yield held


def fetch(store: Store, key: str, file: BinaryIO, *, size_bytes: int, digest: str) -> None:
    """Write an object to ``file``. Raises :class:`DigestMismatch` on a wrong size or digest."""
    for piece in _verified(pieces(store, key, size_bytes), key, digest):
        file.write(piece)
