"""Old segments become packs; no reader misses one, and a crash at any step loses nothing. The
oldest packs are deleted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.support.segments import every_segment
from diloco.inspection.reader import Reader
from diloco.inspection.telemetry import _newest
from diloco.protocol import keys
from diloco.protocol.packed_telemetry import (
    BLOCK,
    LENGTH_BYTES,
    keys_of_block,
    next_segment,
    pack,
    pack_key,
    read_pack,
    unpack,
)
from diloco.protocol.records import BadRecord, Identity
from diloco.protocol.telemetry import Segment
from diloco.store.base import Data, LocalStore, MissingKey, StoreUnavailable
from diloco.telemetry.compaction import Compaction, pack_block

OLD, NEW = "00001-00000000", "00002-00000000"


def write(store: LocalStore, n: int, incarnation: str = OLD) -> None:
    segment = Segment(replica=1, incarnation=incarnation, n=n, wall_s=n, state="computing", round=n)
    store.put(keys.telemetry(1, incarnation, n), segment.to_bytes())


def write_all(store: LocalStore, numbers: Iterable[int], incarnation: str = OLD) -> None:
    for n in numbers:
        write(store, n, incarnation)


def read_segment(store: LocalStore, incarnation: str, n: int) -> bytes:
    """Segment ``n``, packed or not, as a reader finds it."""
    try:
        return store.get(keys.telemetry(1, incarnation, n), limit=Segment.LIMIT)
    except MissingKey:
        segments = read_pack(store, 1, incarnation, n)
        if n not in segments:
            raise
        return segments[n]


def numbers_read(store: LocalStore, most: int, incarnation: str = OLD) -> list[int]:
    """Read as a reader does: the next number until it is missing."""
    found = []
    for n in range(1, most + 1):
        try:
            data = read_segment(store, incarnation, n)
        except MissingKey:
            break
        found.append(Segment.from_bytes(data).n)
    return found


def names(store: LocalStore) -> list[str]:
    return [info.key.rsplit("/", 1)[1] for info in store.list("telemetry/")]


class Dying(LocalStore):
    """A store whose process dies before its ``left``-th change."""

    left = 10**9

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoreUnavailable("killed")

    def put(self, key: str, data: Data) -> None:
        self._change()
        super().put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._change()
            super().delete([key])


@pytest.fixture
def store(tmp_path: Path) -> Dying:
    return Dying(tmp_path)


def test_a_process_packs_a_block_when_the_next_one_is_full(store: Dying) -> None:
    compaction = Compaction(store, Identity(replica=1, incarnation=OLD), is_over=lambda: False)
    for n in range(1, 3 * BLOCK + 1):
        write(store, n)
        compaction.run(n)
        if n == 2 * BLOCK - 1:
            assert len(names(store)) == n
    packs = [name for name in names(store) if name.endswith(".pack")]
    assert packs == ["00000001.pack", f"{BLOCK + 1:08d}.pack"]
    assert len(names(store)) == 2 + BLOCK
    assert numbers_read(store, 4 * BLOCK) == list(range(1, 3 * BLOCK + 1))


def test_a_replica_keeps_the_newest_packs_of_all_its_processes(store: Dying) -> None:
    write_all(store, range(1, BLOCK + 8))
    new = Identity(replica=1, incarnation=NEW)
    compaction = Compaction(store, new, is_over=lambda: False, packs_kept=2)
    kept: list[list[str]] = []
    for n in range(1, 4 * BLOCK + 1):
        write(store, n, NEW)
        compaction.run(n)
        packs = [info.key for info in store.list("telemetry/") if info.key.endswith(".pack")]
        if not kept or kept[-1] != packs:
            kept.append(packs)
    old = [pack_key(1, OLD, 1), pack_key(1, OLD, BLOCK + 1)]
    own = [pack_key(1, NEW, first) for first in (1, BLOCK + 1, 2 * BLOCK + 1)]
    assert kept == [old[:1], old, [old[1], own[0]], own[:2], own[1:]]
    assert len(names(store)) == 2 + BLOCK


def test_a_block_that_cannot_be_packed_is_deleted_as_well(store: Dying) -> None:
    write_all(store, (1, 3))  # a gap
    compaction = Compaction(
        store, Identity(replica=1, incarnation=NEW), is_over=lambda: False, packs_kept=1
    )
    for n in range(1, 2 * BLOCK + 1):
        write(store, n, NEW)
        compaction.run(n)
    assert not store.list(keys.telemetry_dir(1, OLD))
    assert numbers_read(store, 3 * BLOCK, NEW) == list(range(1, 2 * BLOCK + 1))


def test_more_old_blocks_than_are_kept_are_not_packed_first(
    store: Dying, caplog: pytest.LogCaptureFixture
) -> None:
    for process in range(1, 5):
        write(store, 1, f"{process:05d}-00000000")
    newest = Identity(replica=1, incarnation="00005-00000000")
    compaction = Compaction(store, newest, is_over=lambda: False, packs_kept=1)
    for n in range(1, 4):
        compaction.run(n)
    left = [info.key for info in store.list("telemetry/")]
    assert left == [pack_key(1, "00004-00000000", 1)] and not caplog.records


def test_a_pack_that_begins_within_a_block_deletes_nothing(store: Dying) -> None:
    write_all(store, range(1, BLOCK + 1))
    store.put(keys.telemetry_pack(1, OLD, 7), b"no pack")
    newest = Identity(replica=1, incarnation=NEW)
    compaction = Compaction(store, newest, is_over=lambda: False, packs_kept=1)
    for n in range(1, 4):
        compaction.run(n)
    assert numbers_read(store, BLOCK, OLD) == list(range(1, BLOCK + 1))


def test_a_deletion_that_fails_is_repeated(store: Dying) -> None:
    write_all(store, range(1, 3))
    write_all(store, range(1, 3), NEW)
    newest = Identity(replica=1, incarnation="00003-00000000")
    compaction = Compaction(store, newest, is_over=lambda: False, packs_kept=1)
    store.left = 1 + 2  # one pack is written, and its segments are deleted
    with pytest.raises(StoreUnavailable):
        compaction.run(1)
    store.left = 10**9
    compaction.run(1)
    assert [info.key for info in store.list("telemetry/")] == [pack_key(1, NEW, 1)]


def test_a_new_process_packs_everything_of_earlier_ones(store: Dying) -> None:
    write_all(store, range(1, BLOCK + 8))
    compaction = Compaction(store, Identity(replica=1, incarnation=NEW), is_over=lambda: False)
    for n in range(1, 4):
        write(store, n, NEW)
        compaction.run(n)
    assert len(names(store)) == 2 + 3
    assert numbers_read(store, 2 * BLOCK) == list(range(1, BLOCK + 8))
    write(store, BLOCK + 8)  # a late write of the earlier process
    assert numbers_read(store, 2 * BLOCK)[-1] == BLOCK + 8


@pytest.mark.parametrize("changes", [0, 1, 2, BLOCK // 2, BLOCK])
def test_a_crash_at_any_step_loses_nothing_and_the_next_process_continues(
    store: Dying, changes: int
) -> None:
    everything = list(range(1, BLOCK + 1))
    write_all(store, everything)
    store.left = changes
    with pytest.raises(StoreUnavailable):
        pack_block(store, 1, OLD, everything)
    assert numbers_read(store, BLOCK) == everything
    store.left = 10**9
    remaining = [n for info in store.list("telemetry/") if (n := _number(info.key))]
    pack_block(store, 1, OLD, remaining)
    assert numbers_read(store, BLOCK) == everything
    assert names(store) == ["00000001.pack"]


def _number(key: str) -> int:
    parsed = keys.parse_telemetry(key)
    return parsed[2] if parsed else 0


def test_a_reader_between_two_segments_does_not_notice(store: Dying) -> None:
    write_all(store, range(1, BLOCK + 1))
    assert numbers_read(store, 10) == list(range(1, 11))
    pack_block(store, 1, OLD, range(1, BLOCK + 1))
    data = read_segment(store, OLD, 11)
    assert Segment.from_bytes(data).n == 11


def test_an_old_listing_of_packed_segments_changes_nothing(store: Dying) -> None:
    write_all(store, range(1, 11))
    pack_block(store, 1, OLD, range(1, 11))
    before = store.get(pack_key(1, OLD, 1))
    assert not pack_block(store, 1, OLD, range(1, 11))
    assert store.get(pack_key(1, OLD, 1)) == before


@pytest.mark.parametrize("damage", ["missing", "damaged", "gap"])
def test_a_block_with_a_bad_segment_is_kept(store: Dying, damage: str) -> None:
    write_all(store, (n for n in range(1, 11) if (damage, n) != ("gap", 5)))
    listed = [n for n in range(1, 11) if (damage, n) != ("gap", 5)]
    if damage == "missing":
        store.delete([keys.telemetry(1, OLD, 5)])
    elif damage == "damaged":
        key = keys.telemetry(1, OLD, 5)
        store.put(key, store.get(key).replace(b"computing", b"comPuting"))
    before = names(store)
    assert not pack_block(store, 1, OLD, listed)
    assert names(store) == before


def test_an_ending_process_stops_packing(store: Dying) -> None:
    write_all(store, range(1, BLOCK + 1))
    calls = itertools.count()
    assert not pack_block(store, 1, OLD, range(1, BLOCK + 1), is_over=lambda: next(calls) > 20)
    assert len(names(store)) == BLOCK


def test_a_pack_is_checked() -> None:
    data = pack(1, OLD, {1: b"first", 2: b"second"})
    assert unpack(data, 1, OLD, 1) == {1: b"first", 2: b"second"}
    for bad in (
        b"",
        data[:-1],
        data + b"x",
        data[:LENGTH_BYTES],
        data.replace(b"second", b"secund"),
        (2**31).to_bytes(LENGTH_BYTES, "big") + data[LENGTH_BYTES:],
    ):
        with pytest.raises(BadRecord):
            unpack(bad, 1, OLD, 1)
    for owner in ((2, OLD, 1), (1, NEW, 1), (1, OLD, 1 + BLOCK)):
        with pytest.raises(BadRecord, match="expected the pack"):
            unpack(data, *owner)


@pytest.mark.parametrize("numbers", [(1, 3), (2, 3), (BLOCK, BLOCK + 1)])
def test_a_pack_has_the_first_segments_of_one_block(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected the first segments of the block"):
        pack(1, OLD, dict.fromkeys(numbers, b""))


def test_a_damaged_pack_is_refused_by_name(store: Dying) -> None:
    store.put(pack_key(1, OLD, 1), b"no pack")
    with pytest.raises(BadRecord, match=r"00000001\.pack"):
        read_pack(store, 1, OLD, 7)


def test_every_segment_is_read_once_and_in_order(store: Dying) -> None:
    write_all(store, range(1, BLOCK + 3))
    first = store.get(keys.telemetry(1, OLD, 1))
    pack_block(store, 1, OLD, range(1, BLOCK + 1))
    store.put(keys.telemetry(1, OLD, 1), first)  # the process was killed before it deleted all
    found = [Segment.from_bytes(data).n for data in every_segment(store)]
    assert found == list(range(1, BLOCK + 3))


def test_readers_find_the_first_segment_that_is_left(store: Dying) -> None:
    write_all(store, range(1, 2 * BLOCK + 3))
    for first in (1, BLOCK + 1):
        pack_block(store, 1, OLD, range(first, first + BLOCK))
    assert next_segment(store, 1, OLD, 1) == 1
    store.delete(keys_of_block(1, OLD, 1))
    assert next_segment(store, 1, OLD, 1) == BLOCK + 1
    assert next_segment(store, 1, OLD, BLOCK + 2) == 2 * BLOCK + 1
    assert next_segment(store, 1, OLD, 2 * BLOCK + 3) == next_segment(store, 1, NEW, 1) == 0


@pytest.mark.parametrize("last", [BLOCK + 1, BLOCK + 3, 2 * BLOCK + 2])
def test_inspect_finds_the_newest_segment_when_the_first_are_deleted(
    store: Dying, last: int
) -> None:
    write_all(store, range(BLOCK + 1, last + 1))
    with ThreadPoolExecutor(4) as pool:
        reader = Reader(store, pool)
        assert _newest(reader, Identity(replica=1, incarnation=OLD)) == last
        assert _newest(reader, Identity(replica=1, incarnation=NEW)) == 0


def test_inspect_reads_packed_segments(store: Dying) -> None:
    write_all(store, range(1, BLOCK + 3))
    pack_block(store, 1, OLD, range(1, BLOCK + 1))
    identity = Identity(replica=1, incarnation=OLD)
    with ThreadPoolExecutor(4) as pool:
        reader = Reader(store, pool)
        found = reader.read_segments((identity, n) for n in range(BLOCK - 1, BLOCK + 4))
    assert [s.n if s else None for s in found] == [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, None]
    assert not reader.unreadable
    assert keys.kind_of(pack_key(1, OLD, 1)) == keys.Kind.TELEMETRY
