"""Large objects of manifests: written part by part, and verified part by part when read.

A manifest has the checksum of each part of an object (:mod:`diloco.protocol.object_digest`). An
upload computes them in passing; a download compares each part before its values are used, and reads
a damaged part alone again. So neither needs memory for the object, only for the parts in flight.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco.errors import DamagedObject
from diloco.exchange.upload import UPLOADS, bytes_to_verify
from diloco.model.tensor_file import (
    Entry,
    Filling,
    TensorWriter,
    Window,
    header_bytes,
    parse_header,
)
from diloco.protocol.object_digest import CHECKSUM_DIGITS, ObjectDigest, checksum_of
from diloco.protocol.parallel_reads import Parts, call_each, read_parts
from diloco.protocol.pieces import Part, keys_of, part_count, parts_of, sizes_of
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
    parts = _checked_parts(stored)
    half = -(-min(limit, stored.size_bytes) // (2 * PART_BYTES))
    try:
        for part in dict.fromkeys([*parts[:half], *parts[max(0, len(parts) - half) :]]):
            _verified(store, part, _read_part(store, part), reads=2)
    except (DamagedObject, MissingKey):
        return False
    return True


def get_object(store: Store, described: StoredObject) -> bytes:
    """Read a small object of a manifest. Raises :class:`DamagedObject` if a part differs from its
    checksum in :data:`~diloco.protocol.reading.READS` reads."""
    return b"".join(_verified_parts(store, _checked_parts(described)))


def verify_object(store: Store, described: StoredObject) -> None:
    """Read an object of a manifest. Raises the errors of :func:`get_object`."""
    for _ in _verified_parts(store, _checked_parts(described)):
        pass


@dataclass(frozen=True)
class _CheckedPart:
    """A part and its checksum."""

    part: Part
    checksum: str


def _checked_parts(described: StoredObject) -> list[_CheckedPart]:
    """Return the parts of an object. Raises :class:`DamagedObject` for an empty one, which no
    manifest names, and for a wrong number of checksums."""
    if described.size_bytes < 1:
        raise DamagedObject(
            f"{described.key}: expected a size of at least 1 byte in its manifest, found "
            f"{described.size_bytes}"
        )
    count = part_count(described)  # can be large: the list is made once it is known to be right
    expected = CHECKSUM_DIGITS * count
    if len(described.checksums) != expected:
        raise DamagedObject(
            f"{described.key}: expected checksums of {count} parts in its manifest, found "
            f"{len(described.checksums)} of {expected} digits"
        )
    return [
        _CheckedPart(part, described.checksums[n * CHECKSUM_DIGITS : (n + 1) * CHECKSUM_DIGITS])
        for n, part in enumerate(parts_of(described))
    ]


def _verified_parts(store: Store, checked: Sequence[_CheckedPart]) -> Parts:
    """Yield parts, some read ahead, each compared with its checksum. Raises the errors of
    :func:`get_object`."""
    requests = [(each.part.key, each.part.start, each.part.length) for each in checked]
    with contextlib.closing(read_parts(store, requests)) as parts:
        for each, data in zip(checked, parts, strict=True):
            yield _verified(store, each, data, reads=READS)


def _read_part(store: Store, checked: _CheckedPart) -> bytes:
    return store.get_range(checked.part.key, checked.part.start, checked.part.length)


def _verified(store: Store, checked: _CheckedPart, data: bytes, *, reads: int) -> bytes:
    """Return the bytes of a part that have its checksum: ``data``, or the result of another read,
    up to ``reads`` in total. Raises :class:`DamagedObject`."""
    part, expected = checked.part, checked.checksum
    while True:
        found, reads = checksum_of(data), reads - 1
        if found == expected and len(data) == part.length:
            return data
        message = (
            f"{part.key}: expected checksum {expected} of the {part.length} bytes from "
            f"{part.start}, found {found} of {len(data)} bytes"
        )
        if not reads:
            raise DamagedObject(message)
        log.warning("%s; reading them again", message)
        data = _read_part(store, checked)


def load_tensors(
    store: Store, described: StoredObject, target: Target = Entry.empty
) -> dict[str, Tensor]:
    """Read a safetensors object of a manifest into the tensors of ``target``; return those by name.

    A tensor can be incomplete after an exception: a caller uses it only after this function has
    returned. Raises :class:`DamagedObject`, and :class:`ValueError` of ``target``.
    """
    tensors: dict[str, Tensor] = {}

    def windows(entry: Entry) -> Iterable[Window]:
        if (tensor := target(entry)) is not None:
            tensors[entry.name] = tensor
            yield Window(0, tensor.reshape(-1))

    load_windows(store, described, windows)
    return tensors


def load_windows(
    store: Store, described: StoredObject, windows: Callable[[Entry], Iterable[Window]]
) -> None:
    """Read those elements of a safetensors object that ``windows`` returns for each of its tensors,
    and no part without any of them, except the header's. Errors as for :func:`load_tensors`."""
    checked = _checked_parts(described)
    start, size, count = bytearray(), 1, 0
    try:
        while len(start) < size:
            part, count = checked[count], count + 1
            start += _verified(store, part, _read_part(store, part), reads=READS)
            size = header_bytes(start, described.size_bytes)
        entries = parse_header(start[:size], described.size_bytes)
    except ValueError as error:
        raise DamagedObject(f"{described.key}: expected safetensors, found {error}") from None
    _check_length(store, described)
    try:
        filling = Filling([(entry, [*windows(entry)]) for entry in entries])
    except (RuntimeError, MemoryError) as error:
        raise DamagedObject(f"{described.key}: {error}") from None
    filling.add(0, start)
    needed = [each for each in checked[count:] if filling.needs(each.part.at, each.part.stop)]
    with contextlib.closing(_verified_parts(store, needed)) as parts:
        for each, data in zip(needed, parts, strict=True):
            filling.add(each.part.at, data)


def _check_length(store: Store, described: StoredObject) -> None:
    """Check that the last byte of each piece exists, before memory is reserved for a size that any
    writer of the bucket could have written into the manifest."""

    def has_last_byte(piece: tuple[str, int]) -> bool:
        key, size_bytes = piece
        return bool(store.get_range(key, size_bytes - 1, 1))

    pieces = list(zip(keys_of(described), sizes_of(described), strict=True))
    if not all(call_each(has_last_byte, pieces)):
        raise DamagedObject(f"{described.key}: expected {described.size_bytes} bytes, found fewer")
