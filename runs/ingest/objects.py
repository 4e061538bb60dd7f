"""Streams large objects of a bucket in pieces, for downloads and exports.

A checkpoint can be larger than this process's memory. Its digest is compared with the manifest
before the last piece is passed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import BinaryIO

from diloco.protocol import keys
from diloco.protocol.object_digest import ObjectDigest
from diloco.protocol.pieces import read_range
from diloco.protocol.records import BadRecord, CheckpointManifest, StoredObject
from diloco.store.base import MissingKey, Store
from runs.ingest.stores import folder_store
from runs.models import Checkpoint

PIECE_BYTES = 8 * 1024 * 1024
READ_TWICE_BYTES = 1 << 30
"""Objects in a folder up to this size are verified before the first byte is sent; this takes about
a second."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DigestMismatch(Exception):
    """An object's size or digest differs from its manifest."""


def weights_of(store: Store, checkpoint: Checkpoint) -> StoredObject:
    """The weights of a checkpoint. The manifest has the pieces of those that the ranks of a replica
    have written; the digest is that of the row, which was compared with it."""
    stored = StoredObject(
        key=checkpoint.key, size_bytes=checkpoint.size_bytes, sha256=checkpoint.digest
    )
    if checkpoint.final:
        return stored
    try:
        manifest = CheckpointManifest.read(store, keys.checkpoint_manifest(checkpoint.round))
    except (BadRecord, MissingKey):
        return stored
    named = manifest.weights
    is_same = (named.key, named.size_bytes) == (stored.key, stored.size_bytes)
    return replace(stored, pieces=named.pieces) if is_same else stored


def pieces(store: Store, stored: StoredObject) -> Iterator[bytes]:
    """Iterate over an object. The first piece is read immediately.

    Raises :class:`DigestMismatch` if the object is shorter, :class:`MissingKey` if it was deleted.
    """
    key, size_bytes = stored.key, stored.size_bytes
    first = read_range(store, stored, 0, min(PIECE_BYTES, max(size_bytes, 1)))

    def rest() -> Iterator[bytes]:
        read, piece = 0, first
        while piece:
            read += len(piece)
            yield piece
            if read >= size_bytes:
                break
            piece = read_range(store, stored, read, min(PIECE_BYTES, size_bytes - read))
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
    stored = weights_of(store, checkpoint)
    if folder_store(store) is not None and stored.size_bytes <= READ_TWICE_BYTES:
        for _ in _verified(store, stored):
            pass
    checked = _verified(store, stored)
    first = next(checked)  # an object of one piece is fully verified here
    return chain([first], checked)


def _verified(store: Store, stored: StoredObject) -> Iterator[bytes]:
    """Delay each piece until the next one is read, and the last one until the digest is
    verified."""
    found, held = ObjectDigest(pieces=stored.pieces or ()), b""
    for piece in pieces(store, stored):
        if held:
            yield held
        found.update(piece)
        held = piece
    if not found.matches(stored.digest):
        raise DigestMismatch(
            f"{stored.key}: expected the digest {stored.digest}, found sha256 {found.sha256}"
        )
    yield held


def fetch(store: Store, stored: StoredObject, file: BinaryIO) -> None:
    """Write an object to ``file``. Raises :class:`DigestMismatch` on a wrong size or digest."""
    for piece in _verified(store, stored):
        file.write(piece)
