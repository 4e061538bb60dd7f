"""Packs of rounds: the records of :data:`BLOCK` consecutive rounds in one object.

A log of 10,000 rounds of 8 replicas has 100,000 records, and a reader of the whole log needs a
request for each. So old rounds are packed (:mod:`diloco.training.round_packs`): contribution
records, plans and commits as they are, byte by byte. Later the contribution records are deleted.
Plans and commits stay: they are created only once, and a deleted one could be created again, with
another content.

A pack is zlib-compressed: the length of its header (4 bytes, big-endian), the header as a record,
and the records, one after the other. Its key follows from the number of a round. A pack is
untrusted: its size is limited before and after decompression, a damaged one is reported by its key
and then ignored, and each record is checked, limited and refused as if it had been read under its
own key.
"""

from __future__ import annotations

import builtins
import hashlib
import logging
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from diloco.protocol import keys
from diloco.protocol.reading import READS
from diloco.protocol.record_base import MEBIBYTE, BadRecord, Record
from diloco.store.base import (
    LISTED,
    MissingKey,
    NotAnObject,
    ObjectInfo,
    ObjectTooLarge,
    Store,
    check_size,
)

log = logging.getLogger(__name__)

BLOCK = 16
"""Rounds of a pack: 1 to 16, 17 to 32, and so on."""
PACK_LIMIT = 16 * MEBIBYTE
"""Bytes of a pack."""
UNPACKED_LIMIT = 32 * MEBIBYTE
"""Bytes of a pack after decompression. A larger block is not packed."""
LENGTH_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class RoundPackHeader(Record):
    """The keys of the records, sorted, and their sizes in bytes; ``sha256`` is that of all of them
    together. The first round is ``first``."""

    LIMIT: ClassVar[int] = 4 * MEBIBYTE

    first: int
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    sha256: str


def first_of_block(round: int) -> int:
    """Return the first round of the block of ``round``."""
    return (round - 1) // BLOCK * BLOCK + 1


def pack(first: int, records: Mapping[str, bytes]) -> bytes:
    """Return the pack of the records of a block by key. Raises :class:`ValueError` for a block
    that is too large."""
    names = tuple(sorted(records))
    body = b"".join(records[name] for name in names)
    header = RoundPackHeader(
        first=first,
        keys=names,
        sizes=tuple(len(records[name]) for name in names),
        sha256=hashlib.sha256(body).hexdigest(),
    ).to_bytes()
    raw = len(header).to_bytes(LENGTH_BYTES, "big") + header + body
    data = zlib.compress(raw, 1)
    for size_bytes, limit in (
        (len(header), RoundPackHeader.LIMIT),
        (len(raw), UNPACKED_LIMIT),
        (len(data), PACK_LIMIT),
    ):
        if size_bytes > limit:
            raise ValueError(f"expected at most {limit} bytes, found {size_bytes}")
    return data


def unpack(data: bytes, first: int, *, limit: int = UNPACKED_LIMIT) -> dict[str, bytes]:
    """Return the records of a pack by key. Raises :class:`BadRecord`."""
    raw = _decompressed(data, limit)
    length = int.from_bytes(raw[:LENGTH_BYTES], "big")
    if not 0 < length <= RoundPackHeader.LIMIT:
        raise BadRecord(f"expected a header of 1 to {RoundPackHeader.LIMIT} bytes, found {length}")
    header = RoundPackHeader.from_bytes(raw[LENGTH_BYTES : LENGTH_BYTES + length])
    if header.first != first:
        raise BadRecord(f"expected the pack of round {first}, found that of {header.first}")
    names, sizes = header.keys, header.sizes
    if len(names) != len(sizes) or len(set(names)) != len(names):
        raise BadRecord(f"expected one size for each key, found {len(sizes)} of {len(names)}")
    if any((r := keys.round_of_record(n)) is None or first_of_block(r) != first for n in names):
        raise BadRecord(f"expected records of the block of round {first}, found others")
    body = memoryview(raw)[LENGTH_BYTES + length :]
    if min(sizes, default=0) < 0 or sum(sizes) != len(body):
        raise BadRecord("expected the size of each record, found other sizes")
    if hashlib.sha256(body).hexdigest() != header.sha256:
        raise BadRecord("expected the digest of the pack, found another")
    records, start = {}, 0
    for name, size in zip(names, sizes, strict=True):
        records[name] = bytes(body[start : start + size])
        start += size
    return records


def _decompressed(data: bytes, limit: int) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        raw = decompressor.decompress(data, limit + 1)
    except zlib.error as error:
        raise BadRecord(f"expected compressed records, found {error}") from None
    if len(raw) > limit:
        if limit < UNPACKED_LIMIT:
            raise PackTooLarge
        raise BadRecord(f"expected at most {limit} bytes of records, found more")
    if not decompressor.eof or decompressor.unused_data:
        raise BadRecord("expected a whole pack, found another length")
    return raw


class PackTooLarge(Exception):
    """A pack has more bytes than its reader keeps in memory. Not an error of the pack."""


def read_pack(store: Store, round: int, *, limit: int = UNPACKED_LIMIT) -> dict[str, bytes] | None:
    """Return the records of the pack that has ``round``; None if there is no pack.

    Raises :class:`BadRecord` if :data:`~diloco.protocol.reading.READS` reads fail their check, and
    :class:`PackTooLarge` for more than ``limit`` bytes after decompression.
    """
    first = first_of_block(round)
    error = BadRecord("never raised")
    for _ in range(READS):
        try:
            return unpack(store.get(keys.round_pack(first), limit=PACK_LIMIT), first, limit=limit)
        except MissingKey:
            return None
        except (BadRecord, NotAnObject, ObjectTooLarge) as found:
            error = BadRecord(str(found))
            log.warning("%s: %s; reading it again", keys.round_pack(first), error)
    raise error


class PackedRounds:
    """A store that also returns the records of rounds from their packs.

    By default an object is read from its own key, and a contribution record from the pack if it is
    not there: the newest rounds have no pack, and plans and commits are never deleted, so that a
    pack cannot decide a round that has none. With ``packs_first`` it is the other way around, for a
    reader of the whole log: it reads one object for each block, and does not list packed rounds.

    The last pack read is kept; one with more than ``limit`` bytes raises :class:`PackTooLarge`.
    That there was no pack is not kept for a contribution record without its own object: the block
    can have been packed meanwhile.
    """

    def __init__(
        self, inner: Store, *, packs_first: bool = False, limit: int = UNPACKED_LIMIT
    ) -> None:
        self.inner = inner
        self.uri, self.atomic_create = inner.uri, inner.atomic_create
        self._packs_first = packs_first
        self._limit = limit
        self._pack: tuple[int, dict[str, bytes] | None] = (0, None)
        """First round and records of the last pack; None if there was none."""
        self._refused: builtins.list[tuple[str, BadRecord]] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        if self._packs_first and (data := self._packed_record(key)) is not None:
            return data if limit is None else check_size(key, data, limit)
        try:
            return self.inner.get(key, limit=limit)
        except MissingKey:
            if not (parsed := keys.parse_contribution_record(key)):
                raise
            if (data := self._read(parsed[0], again=True).get(key)) is None:
                raise
            return data if limit is None else check_size(key, data, limit)

    def list(self, prefix: str, *, limit: int = LISTED) -> builtins.list[ObjectInfo]:
        """Return a listing; with ``packs_first`` that of a packed round's contributions is made
        from its pack."""
        if self._packs_first and (round := keys.round_of_contributions(prefix)) is not None:
            records = self.packed(round)
            if keys.commit(round) in records:
                named = (name for name in records if name.startswith(prefix))
                return [ObjectInfo(name, len(records[name])) for name in named]
        return self.inner.list(prefix, limit=limit)

    def packed(self, round: int) -> dict[str, bytes]:
        """Return the records of the pack that has ``round``; empty without a readable one."""
        return self._read(round)

    def _read(self, round: int, *, again: bool = False) -> dict[str, bytes]:
        """Return the records of a pack; ``again`` looks for one that was not there before."""
        first = first_of_block(round)
        with self._lock:
            if self._pack[0] != first or (again and self._pack[1] is None):
                records: dict[str, bytes] | None = {}
                try:
                    records = read_pack(self.inner, round, limit=self._limit)
                except BadRecord as error:
                    self._refused.append((keys.round_pack(first), error))
                self._pack = (first, records)
            return self._pack[1] or {}

    def packed_contributions(self, round: int) -> tuple[str, ...]:
        """Return the keys of the packed contribution records of a round."""
        folder = keys.contributions(round)
        return tuple(name for name in self._read(round, again=True) if name.startswith(folder))

    def take_refused(self) -> tuple[tuple[str, BadRecord], ...]:
        """Return the packs that could not be read since the last call, with the reasons."""
        with self._lock:
            refused, self._refused = tuple(self._refused), []
            return refused

    def _packed_record(self, key: str) -> bytes | None:
        round = keys.round_of_record(key)
        return None if round is None else self.packed(round).get(key)
