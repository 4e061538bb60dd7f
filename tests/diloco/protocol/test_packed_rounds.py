"""A pack of rounds is bounded, checked and refused by its key; readers do without it."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol import keys, packed_rounds
from diloco.protocol.packed_rounds import (
    BLOCK,
    PACK_LIMIT,
    PackedRounds,
    PackTooLarge,
    RoundPackHeader,
    pack,
    read_pack,
    unpack,
)
from diloco.protocol.records import BadRecord
from diloco.store.base import LocalStore, MissingKey, ObjectTooLarge

FIRST = BLOCK + 1
RECORD = keys.contribution_record(FIRST, 7, "00001-00000007")
OTHER = keys.contribution_record(FIRST, 8, "00001-00000008")
RECORDS = {keys.commit(FIRST): b"commit", keys.plan(FIRST): b"plan", RECORD: b"record"}


class Counting(LocalStore):
    """A folder that notes its reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.read.append(key)
        return super().get(key, limit=limit)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


def forged(body: bytes = b"commit", **values: Any) -> bytes:
    """A pack whose header has wrong ``values``."""
    header = RoundPackHeader(
        **{
            "first": FIRST,
            "keys": (keys.commit(FIRST),),
            "sizes": (len(body),),
            "sha256": hashlib.sha256(body).hexdigest(),
            **values,
        }
    ).to_bytes()
    return zlib.compress(len(header).to_bytes(4, "big") + header + body)


def test_a_pack_has_the_records_as_they_were() -> None:
    assert unpack(pack(FIRST, RECORDS), FIRST) == RECORDS
    assert unpack(forged(), FIRST) == {keys.commit(FIRST): b"commit"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "whole pack"),
        (b"no zlib", "compressed"),
        (pack(FIRST, RECORDS)[:-1], "whole pack"),
        (pack(FIRST, RECORDS) + b"x", "whole pack"),
        (zlib.compress(b""), "header"),
        (zlib.compress(b"\xff" * 50), "header"),
        (zlib.compress(b"\0\0\0\x02{}"), "version"),
        (pack(1, {keys.commit(1): b""}), f"of round {FIRST}, found that of 1"),
        (forged(keys=(keys.commit(1),)), "others"),
        (forged(keys=("group.json",)), "others"),
        (forged(keys=(f"../{keys.commit(FIRST)}",)), "others"),
        (forged(keys=(keys.commit(FIRST),) * 2, sizes=(3, 3)), "one size for each key"),
        (forged(sizes=()), "one size for each key"),
        (forged(keys=(keys.commit(FIRST), keys.plan(FIRST)), sizes=(-1, 7)), "other sizes"),
        (forged(sizes=(2**62,)), "other sizes"),
        (forged(sha256="0" * 64), "digest"),
    ],
)
def test_a_pack_that_no_packer_writes_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        unpack(data, FIRST)


def test_a_pack_is_bounded_before_and_after_decompression(store: Counting) -> None:
    bomb = zlib.compress(bytes(packed_rounds.UNPACKED_LIMIT + 1))
    assert len(bomb) < PACK_LIMIT
    with pytest.raises(BadRecord, match="found more"):
        unpack(bomb, FIRST)
    store.put(keys.round_pack(FIRST), bytes(PACK_LIMIT + 1))
    with pytest.raises(BadRecord, match=f"at most {PACK_LIMIT} bytes"):
        read_pack(store, FIRST)
    with pytest.raises(PackTooLarge):
        unpack(pack(FIRST, RECORDS), FIRST, limit=100)
    with pytest.raises(ValueError, match="at most"):
        pack(FIRST, {RECORD: bytes(packed_rounds.UNPACKED_LIMIT)})


@pytest.mark.parametrize("packs_first", [False, True])
def test_a_record_is_read_wherever_it_is(store: Counting, packs_first: bool) -> None:
    reader = PackedRounds(store, packs_first=packs_first)
    with pytest.raises(MissingKey):
        reader.get(RECORD)
    store.put(keys.round_pack(FIRST), pack(FIRST, RECORDS))
    reader = PackedRounds(store, packs_first=packs_first)
    assert reader.get(RECORD) == b"record"
    with pytest.raises(ObjectTooLarge):
        reader.get(RECORD, limit=3)
    single = keys.commit(FIRST + 1)
    store.put(single, b"single")
    assert reader.get(single) == b"single"
    store.put(keys.GROUP, b"group")
    assert reader.get(keys.GROUP) == b"group"
    assert reader.packed_contributions(FIRST) == (RECORD,)
    assert reader.packed_contributions(FIRST + 1) == ()


def test_a_reader_of_the_whole_log_makes_one_request_per_pack(store: Counting) -> None:
    store.put(keys.round_pack(FIRST), pack(FIRST, RECORDS))
    reader = PackedRounds(store, packs_first=True)
    assert {key: reader.get(key) for key in RECORDS} == RECORDS
    assert [info.key for info in reader.list(keys.contributions(FIRST))] == [RECORD]
    assert store.read == [keys.round_pack(FIRST)]
    store.put(keys.contribution_record(FIRST + 1, 7, "00001-00000007"), b"")
    assert len(reader.list(keys.contributions(FIRST + 1))) == 1, "that round is not in the pack"


def test_the_newest_rounds_are_read_without_looking_for_a_pack(store: Counting) -> None:
    for key, data in RECORDS.items():
        store.put(key, data)
    reader = PackedRounds(store)
    assert {key: reader.get(key) for key in RECORDS} == RECORDS
    assert store.read == list(RECORDS)


@pytest.mark.parametrize("packs_first", [False, True])
@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: bytes(PACK_LIMIT + 1)])
def test_a_damaged_pack_is_named_once_and_single_records_are_read(
    store: Counting, packs_first: bool, spoil: Callable[[bytes], bytes]
) -> None:
    store.put(keys.round_pack(FIRST), spoil(pack(FIRST, RECORDS)))
    store.put(RECORD, b"single")
    reader = PackedRounds(store, packs_first=packs_first)
    assert reader.get(RECORD) == b"single"
    for _ in range(2):
        with pytest.raises(MissingKey):
            reader.get(OTHER)
    assert [key for key, _ in reader.take_refused()] == [keys.round_pack(FIRST)]
    assert reader.take_refused() == ()


def test_a_pack_decides_no_round(store: Counting) -> None:
    """One that a hostile replica has written in advance has the commits of later rounds."""
    store.put(keys.round_pack(FIRST), pack(FIRST, RECORDS))
    reader = PackedRounds(store)
    for key in (keys.commit(FIRST), keys.plan(FIRST)):
        with pytest.raises(MissingKey):
            reader.get(key)
    assert keys.round_pack(FIRST) not in store.read, "the open round costs no more requests"


@pytest.mark.parametrize("packs_first", [False, True])
def test_a_block_that_is_packed_while_it_is_read_is_found(
    store: Counting, packs_first: bool
) -> None:
    for key, data in RECORDS.items():
        store.put(key, data)
    reader = PackedRounds(store, packs_first=packs_first)
    with pytest.raises(MissingKey):
        reader.get(OTHER)
    store.put(keys.round_pack(FIRST), pack(FIRST, RECORDS))
    store.delete([RECORD])
    assert reader.get(RECORD) == b"record"
    reader = PackedRounds(LocalStore(store.root), packs_first=packs_first)
    store.delete([keys.round_pack(FIRST)])
    assert reader.packed(FIRST) == {}
    store.put(keys.round_pack(FIRST), pack(FIRST, RECORDS))
    assert reader.packed_contributions(FIRST) == (RECORD,)
