"""Old rounds become packs; no reader misses a record, and a crash at any step loses nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from diloco.protocol import keys
from diloco.protocol.packed_rounds import BLOCK, PackedRounds, pack, read_pack
from diloco.protocol.records import BadRecord
from diloco.store.base import Data, LocalStore, ObjectInfo, StoreUnavailable
from diloco.training import round_packs
from diloco.training.round_packs import blocks, pack_rounds
from tests.diloco.bucket_harness import Harness, who

LAST = 3 * BLOCK
EVERY = 4
"""Rounds between checkpoints."""


class Hooked(LocalStore):
    """A store that calls ``before`` with the verb and key before each change."""

    before: Callable[[str, str], None] = staticmethod(lambda verb, key: None)

    def create(self, key: str, data: Data) -> bool:
        self.before("create", key)
        return super().create(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.before("delete", key)
            super().delete([key])


@pytest.fixture
def store(tmp_path: Path) -> Hooked:
    return Hooked(tmp_path)


@pytest.fixture
def group(store: Hooked) -> Harness:
    made = Harness(store)
    for round in range(1, LAST + 1):
        made.contribute(round, 0, 1, payload=False)
        made.plan(round, 0, 1)
        made.commit(round, 0, 1)
    store.put(keys.checkpoint_manifest(0), b"{}")
    return made


def checkpoint(store: LocalStore, round: int) -> None:
    store.put(keys.checkpoint_manifest(round), b"{}")


def records(store: LocalStore) -> dict[str, bytes]:
    """The records under their own keys."""
    found = [info.key for info in store.list(keys.ROUNDS)]
    return {key: store.get(key) for key in found if keys.round_of_record(key)}


def packs(store: LocalStore) -> list[str]:
    return [info.key for info in store.list(keys.PACKS)]


def rounds_with_records(store: LocalStore) -> list[int]:
    found = (keys.parse_contribution_record(key) for key in records(store))
    return sorted({parsed[0] for parsed in found if parsed})


def record(round: int, replica: int = 1, seq: int = 1) -> str:
    return keys.contribution_record(round, replica, who(replica, seq).incarnation)


def as_read(store: LocalStore, names: Iterable[str]) -> dict[str, bytes]:
    """Return what readers get, packs first and single records first, which is the same."""
    first, last = PackedRounds(store, packs_first=True), PackedRounds(store)
    found = {key: first.get(key) for key in names}
    assert found == {key: last.get(key) for key in names}
    return found


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, BLOCK - 1, []),
        (1, BLOCK, [1]),
        (BLOCK, BLOCK, [1]),
        (BLOCK + 1, 2 * BLOCK - 1, []),
        (BLOCK, 2 * BLOCK, [1, BLOCK + 1]),
        (1, -5, []),
    ],
)
def test_a_block_is_due_when_its_last_round_is_in_range(
    first: int, last: int, expected: list[int]
) -> None:
    assert list(blocks(first, last)) == expected


def test_records_are_packed_and_deleted_one_checkpoint_later(store: Hooked, group: Harness) -> None:
    before = records(store)
    for round in range(EVERY, LAST + 1, EVERY):
        checkpoint(store, round)
        left = records(store)
        for _ in range(2):  # by two processes, at the same checkpoint
            pack_rounds(store)
        older, oldest = round - EVERY, round - 2 * EVERY
        assert packs(store) == [keys.round_pack(n) for n in blocks(1, older)]
        deleted = max([n + BLOCK - 1 for n in blocks(1, oldest)], default=0)
        assert rounds_with_records(store) == list(range(deleted + 1, LAST + 1))
        assert all(keys.parse_contribution_record(key) for key in left.keys() - records(store))
    assert rounds_with_records(store)[0] == 2 * BLOCK + 1
    assert as_read(store, before) == before


def test_rounds_that_are_kept_are_not_packed(store: Hooked, group: Harness) -> None:
    for round in range(EVERY, 2 * BLOCK + 1, EVERY):
        checkpoint(store, round)
        pack_rounds(store, rounds_kept=BLOCK - EVERY)
    assert packs(store) == [keys.round_pack(1)]
    assert rounds_with_records(store)[0] == 1


def test_a_process_that_dies_at_any_change_loses_nothing(store: Hooked, group: Harness) -> None:
    before = records(store)
    left, deaths = 0, 0

    def die(verb: str, key: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise StoreUnavailable("killed")

    store.before = die  # type: ignore[method-assign]
    for round in range(EVERY, BLOCK + 2 * EVERY + 1, EVERY):
        checkpoint(store, round)
        for lives_for in itertools.count():
            left = lives_for
            try:
                pack_rounds(store)
            except StoreUnavailable:
                deaths += 1
                assert as_read(store, before) == before
            else:
                break
    assert deaths == 1 + 2 * BLOCK, "before the pack was created, and before each deletion"
    assert rounds_with_records(store)[0] == BLOCK + 1
    assert as_read(store, before) == before


def test_a_call_ends_between_two_reads(store: Hooked, group: Harness) -> None:
    for round in (BLOCK, BLOCK + 1):
        checkpoint(store, round)
    for lives_for in (0, 1, BLOCK, 3 * BLOCK, 4 * BLOCK + 1):
        left = itertools.count(lives_for, -1)

        def check(left: Iterator[int] = left) -> None:
            if next(left) <= 0:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            pack_rounds(store, check=check)
        assert not packs(store)
    pack_rounds(store)
    assert packs(store)


@pytest.mark.slow
def test_two_processes_pack_at_once(store: Hooked, group: Harness) -> None:
    """Each time, the second one begins and ends while the first is about to change something."""
    before = records(store)
    ours = LocalStore(store.root)
    store.before = lambda verb, key: pack_rounds(ours)  # type: ignore[method-assign]
    for round in range(EVERY, LAST + 1, EVERY):
        checkpoint(store, round)
        pack_rounds(store)
        assert as_read(store, before) == before
    assert packs(store) == [keys.round_pack(n) for n in (1, BLOCK + 1)]


def test_a_packer_that_was_suspended_for_hours_changes_nothing(
    store: Hooked, group: Harness
) -> None:
    """It has read a part of the records when they are packed and deleted."""
    before = records(store)
    ours = LocalStore(store.root)

    def others_go_on(verb: str, key: str) -> None:
        store.before = lambda verb, key: None  # type: ignore[method-assign]
        for round in range(3 * EVERY, LAST + 1, EVERY):
            checkpoint(ours, round)
            pack_rounds(ours)

    for round in range(EVERY, BLOCK + EVERY + 1, EVERY):
        checkpoint(store, round)
    store.before = others_go_on  # type: ignore[method-assign]
    pack_rounds(store)
    assert rounds_with_records(store)[0] == 2 * BLOCK + 1
    pack_rounds(store)
    assert as_read(store, before) == before


def test_a_record_that_arrives_after_the_pack_is_kept(store: Hooked, group: Harness) -> None:
    for round in range(EVERY, BLOCK + EVERY + 1, EVERY):
        checkpoint(store, round)
        pack_rounds(store)
    group.contribute(3, 2, payload=False)
    repeated = store.get(record(4))
    for round in range(BLOCK + 2 * EVERY, BLOCK + 3 * EVERY + 1, EVERY):
        checkpoint(store, round)
        pack_rounds(store)
    store.put(record(4), repeated)  # a request that was under way for very long
    assert rounds_with_records(store)[:2] == [3, 4]
    reader = PackedRounds(store)
    assert reader.get(record(3, 2)) and reader.get(record(4)) == repeated


def test_a_planned_record_that_an_old_listing_lacks_is_packed(
    store: Hooked, group: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = LocalStore.list

    def old(self: LocalStore, prefix: str, **options: int) -> list[ObjectInfo]:
        return [i for i in listed(self, prefix, **options) if i.key != record(3)]

    monkeypatch.setattr(LocalStore, "list", old)
    checkpoint(store, BLOCK)
    checkpoint(store, BLOCK + 1)
    pack_rounds(store)
    packed = read_pack(store, 1)
    assert packed is not None and record(3) in packed


@pytest.mark.parametrize(
    "spoil",
    [
        lambda store: store.put(record(3), b"no record"),
        lambda store: store.put(record(3), store.get(record(4))),
        lambda store: store.delete([record(3)]),
        lambda store: store.put(keys.plan(3), b"{}"),
        lambda store: store.delete([keys.plan(3)]),
        lambda store: store.put(keys.commit(3), store.get(keys.commit(4))),
    ],
)
def test_a_block_with_a_damaged_or_missing_record_stays_as_it_is(
    store: Hooked, group: Harness, spoil: Callable[[LocalStore], object]
) -> None:
    spoil(store)
    before = records(store)
    for round in range(EVERY, 2 * BLOCK + EVERY + 1, EVERY):
        checkpoint(store, round)
        pack_rounds(store)
    assert packs(store) == [keys.round_pack(BLOCK + 1)]
    assert {key: data for key, data in before.items() if keys.round_of_record(key) == 3} == {
        key: data for key, data in records(store).items() if keys.round_of_record(key) == 3
    }


@pytest.mark.parametrize("limit", ["UNPACKED_LIMIT", "RECORD_LIMIT"])
def test_a_block_with_too_many_bytes_stays_as_it_is(
    store: Hooked, group: Harness, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(round_packs, limit, 100)
    checkpoint(store, BLOCK)
    checkpoint(store, BLOCK + 1)
    pack_rounds(store)
    assert not packs(store)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found | {record(3): b"no record"},
        lambda found: found | {record(3): found[record(4)]},
        lambda found: found | {keys.plan(3): found[keys.plan(4)]},
        lambda found: {key: data for key, data in found.items() if key != keys.plan(3)},
    ],
)
def test_nothing_is_deleted_beside_a_pack_of_other_records(
    store: Hooked, group: Harness, spoil: Callable[[dict[str, bytes]], dict[str, bytes]]
) -> None:
    """Its digest is right, so only its records show that no packer wrote it."""
    before = {k: data for k, data in records(store).items() if keys.round_of_record(k) in range(17)}
    store.put(keys.round_pack(1), pack(1, spoil(before)))
    for round in range(EVERY, BLOCK + 3 * EVERY + 1, EVERY):
        checkpoint(store, round)
        pack_rounds(store)
    assert records(store).items() >= before.items()


def test_records_that_a_plan_names_are_deleted_first(store: Hooked, group: Harness) -> None:
    """Ingest looks into the pack of a round if a record that its plan names is not listed."""
    group.contribute(3, 0, seq=2, payload=False)
    unplanned, deleted = record(3, 0, 2), []
    store.before = lambda verb, key: deleted.append(key)  # type: ignore[method-assign]
    for round in range(EVERY, BLOCK + 2 * EVERY + 1, EVERY):
        checkpoint(store, round)
        pack_rounds(store)
    assert len(deleted) == 1 + 2 * BLOCK + 1 and deleted[-1] == unplanned


def test_nothing_is_deleted_beside_a_damaged_pack(store: Hooked, group: Harness) -> None:
    before = records(store)
    for round in range(EVERY, 2 * BLOCK + EVERY + 1, EVERY):
        checkpoint(store, round)
        pack_rounds(store)
        if store.list(keys.PACKS) and round < BLOCK + 2 * EVERY:
            intact = store.get(keys.round_pack(1))
            store.put(keys.round_pack(1), intact[:-9] + bytes(9))
    assert rounds_with_records(store) == list(range(1, LAST + 1))
    assert packs(store) == [keys.round_pack(1), keys.round_pack(BLOCK + 1)]
    with pytest.raises(BadRecord):
        read_pack(store, 1)
    assert as_read(store, before) == before
