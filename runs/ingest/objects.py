"""Large objects of a rendezvous, a piece at a time: for downloads and exports.

A checkpoint may be larger than this process' memory, so it is never read whole. What is sent to a
user is compared with the digest that the manifest gives before the last of it is sent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from diloco.protocol import keys
from diloco.store.base import Store
from runs.ingest.stores import folder_store
from runs.models import Checkpoint

PIECE_BYTES = 8 * 1024 * 1024
READ_TWICE_BYTES = 1 << 30
"""Of a folder, objects of up to so many bytes are verified before the first byte is sent; it takes
about a second."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


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


def check_named(checkpoint: Checkpoint) -> None:
    """Raises :class:`NotWhatItWas` where the manifest that the row was made of named anything but
    weights of that checkpoint, or gave no digest of them."""
    key = checkpoint.key
    own = (
        keys.is_final_weights(key)
        if checkpoint.final
        else keys.is_weights_of(key, checkpoint.round)
    )
    if not own:
        raise NotWhatItWas(f"expected a manifest that names the weights of {checkpoint}, found "
                           f"{key!r}")  # fmt: skip
    if not _SHA256.fullmatch(checkpoint.digest):
        raise NotWhatItWas(f"{key}: expected a manifest with a sha256, found {checkpoint.digest!r}")


def verified_pieces(store: Store, checkpoint: Checkpoint) -> Iterator[bytes]:
    """The weights of a checkpoint. Raises :class:`NotWhatItWas` where they are not what the
    manifest says: at once for a folder's and for small ones, else in place of the last piece, so
    that a client cannot take what it has for complete."""
    check_named(checkpoint)
    key, size_bytes, digest = checkpoint.key, checkpoint.size_bytes, checkpoint.digest
    if folder_store(store) is not None and size_bytes <= READ_TWICE_BYTES:
        for _ in _verified(pieces(store, key, size_bytes), key, digest):
            pass
    checked = _verified(pieces(store, key, size_bytes), key, digest)
    first = next(checked)  # of an object of one piece this is all of it
    return chain([first], checked)


def _verified(found: Iterator[bytes], key: str, sha256: str) -> Iterator[bytes]:
    """The pieces, each when the next has been read, and the last when all are verified."""
    digest, held = hashlib.sha256(), b""
    for piece in found:
        if held:
            yield held
        digest.update(piece)
        held = piece
    if digest.hexdigest() != sha256:
        raise NotWhatItWas(f"{key}: expected sha256 {sha256}, found {digest.hexdigest()}")
    yield held


def fetch(store: Store, key: str, file: BinaryIO, *, size_bytes: int, sha256: str) -> None:
    """Write an object to ``file``. Raises :class:`NotWhatItWas` if it is not what it should be."""
    digest = hashlib.sha256()
    for piece in pieces(store, key, size_bytes):
        digest.update(piece)
        file.write(piece)
    if digest.hexdigest() != sha256:
        raise NotWhatItWas(f"{key}: expected sha256 {sha256}, found {digest.hexdigest()}")
