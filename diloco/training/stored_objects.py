"""Large objects of manifests: written part by part, and verified part by part when read.

A manifest has the checksum of each part of an object (:mod:`diloco.protocol.object_digest`). An
upload computes them in passing; a download compares each part before its values are used, and reads
a damaged part alone again. So neither needs memory for the object, only for the parts in flight.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from diloco.errors import DamagedObject
from diloco.exchange.upload import UPLOADS, bytes_to_verify
from diloco.model.tensor_file import Entry, TensorWriter, fill, header_bytes, parse_header
from diloco.protocol.object_digest import CHECKSUM_DIGITS, ObjectDigest, checksum_of, part_count
from diloco.protocol.parallel_reads import Parts, read_parts
from diloco.protocol.reading import READS
from diloco.protocol.records import StoredObject
from diloco.store.base import PART_BYTES, MissingKey, Store
from diloco.store.multipart import Data, MakeParts

log = logging.getLogger(__name__)

Target = Callable[[Entry], Tensor | None]
"""Returns the contiguous CPU tensor to read an entry into, or None to skip it."""


def put_object(store: Store, key: str, data: bytes) -> StoredObject:
    """Store ``data``; see :func:`put_parts`."""
    view = memoryview(data)
    return put_parts(
        store,
        key,
        lambda: (view[at : at + PART_BYTES] for at in range(0, len(view) or 1, PART_BYTES)),
    )


def put_tensors(
    store: Store,
    key: str,
    tensors: Mapping[str, Tensor],
    *,
    sha256: bool = False,
    check: Callable[[], None] = lambda: None,
) -> StoredObject:
    """Store tensors, which must not change meanwhile, as safetensors; see :func:`put_parts`."""
    return put_parts(store, key, TensorWriter(tensors).parts, sha256=sha256, check=check)


def put_parts(
    store: Store,
    key: str,
    make_parts: MakeParts,
    *,
    sha256: bool = False,
    check: Callable[[], None] = lambda: None,
) -> StoredObject:
    """Store an object from its parts, read it back up to a limit, and return its description for a
    manifest, with the ``sha256`` too if other programs read the object.

    ``make_parts`` is called again for each attempt. ``check`` is called before each part; its
    exception aborts the upload.
    """

    digest = ObjectDigest(sha256=sha256)

    def parts() -> Iterator[Data]:
        nonlocal digest
        digest = ObjectDigest(sha256=sha256)
        for part in make_parts():
            check()
            digest.update(part)
            yield part

    for _ in range(UPLOADS):
        store.put_stream(key, parts)
        stored = StoredObject(
            key=key,
            size_bytes=digest.size_bytes,
            checksums=digest.checksums,
            sha256=digest.sha256,
        )
        if _is_stored(store, stored, limit=bytes_to_verify()):
            break
        log.warning("%s was damaged in transit; uploading it again", key)
    return stored


def _is_stored(store: Store, stored: StoredObject, *, limit: int) -> bool:
    """Return whether the store has the object: read parts from its beginning and its end, about
    ``limit`` bytes in total."""
    count = part_count(stored.size_bytes)
    half = -(-min(limit, stored.size_bytes) // (2 * PART_BYTES))
    try:
        for index in sorted({*range(half), *range(count - half, count)}):
            _verified(store, stored, index, _read_part(store, stored, index), reads=2)
    except (DamagedObject, MissingKey):
        return False
    return True


def get_object(store: Store, described: StoredObject) -> bytes:
    """Read a small object of a manifest. Raises :class:`DamagedObject` if a part differs from its
    checksum in :data:`~diloco.protocol.reading.READS` reads."""
    return b"".join(verified_parts(store, described))


def verify_object(store: Store, described: StoredObject) -> None:
    """Read an object of a manifest. Raises the errors of :func:`get_object`."""
    for _ in verified_parts(store, described):
        pass


def verified_parts(store: Store, described: StoredObject) -> Parts:
    """Yield the parts of an object, some read ahead, each compared with its checksum. Raises the
    errors of :func:`get_object`, also for an empty object, which no manifest names."""
    if described.size_bytes < 1:
        raise DamagedObject(
            f"{described.key}: expected a size of at least 1 byte in its manifest, found "
            f"{described.size_bytes}"
        )
    count = part_count(described.size_bytes)
    expected = CHECKSUM_DIGITS * count
    if len(described.checksums) != expected:
        raise DamagedObject(
            f"{described.key}: expected checksums of {count} parts in its manifest, found "
            f"{len(described.checksums)} of {expected} digits"
        )
    requests = [(described.key, *_range(described, index)) for index in range(count)]
    with contextlib.closing(read_parts(store, requests)) as parts:
        for index, part in enumerate(parts):
            yield _verified(store, described, index, part, reads=READS)


def _range(described: StoredObject, index: int) -> tuple[int, int]:
    """Return start and length of a part."""
    start = index * PART_BYTES
    return start, min(PART_BYTES, described.size_bytes - start)


def _read_part(store: Store, described: StoredObject, index: int) -> bytes:
    return store.get_range(described.key, *_range(described, index))


def _verified(
    store: Store, described: StoredObject, index: int, part: bytes, *, reads: int
) -> bytes:
    """Return a part that has its checksum: ``part``, or the result of another read, up to ``reads``
    in total. Raises :class:`DamagedObject`."""
    expected = described.checksums[index * CHECKSUM_DIGITS : (index + 1) * CHECKSUM_DIGITS]
    start, length = _range(described, index)
    while True:
        found, reads = checksum_of(part), reads - 1
        if found == expected and len(part) == length:
            return part
        message = (
            f"{described.key}: expected checksum {expected} of the {length} bytes from {start}, "
            f"found {found} of {len(part)} bytes"
        )
        if not reads:
            raise DamagedObject(message)
        log.warning("%s; reading them again", message)
        part = _read_part(store, described, index)


def load_tensors(
    store: Store, described: StoredObject, target: Target = Entry.empty
) -> dict[str, Tensor]:
    """Read a safetensors object of a manifest into the tensors of ``target``; return those by name.

    A tensor can be incomplete after an exception: a caller uses it only after this function has
    returned. Raises :class:`DamagedObject`, and :class:`ValueError` of ``target``.
    """
    with contextlib.closing(verified_parts(store, described)) as parts:
        start = bytearray(next(parts, b""))
        try:
            size = header_bytes(start, described.size_bytes)
            while len(start) < size:
                start += next(parts)
            entries = parse_header(start[:size], described.size_bytes)
        except ValueError as error:
            raise DamagedObject(f"{described.key}: expected safetensors, found {error}") from None
        _check_length(store, described)
        try:
            tensors = {entry: target(entry) for entry in entries}
        except (RuntimeError, MemoryError) as error:
            raise DamagedObject(f"{described.key}: {error}") from None
        fill(iter(tensors.items()), itertools.chain([start], parts))
    return {entry.name: tensor for entry, tensor in tensors.items() if tensor is not None}


def _check_length(store: Store, described: StoredObject) -> None:
    """Check that the last byte exists, before memory is reserved for a size that any writer of the
    bucket could have written into the manifest."""
    if not store.get_range(described.key, described.size_bytes - 1, 1):
        raise DamagedObject(f"{described.key}: expected {described.size_bytes} bytes, found fewer")
