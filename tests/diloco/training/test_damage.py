"""Damage to one object never stops a run: it is read again, replaced, or named."""

from __future__ import annotations

import fnmatch
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from diloco.errors import ReplicaError
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.reading import MOST_READS, READS, Damaged, read_record
from diloco.protocol.records import BadRecord, Beat, Command, Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import LocalStore
from diloco.training.checkpoint import load_checkpoint, manifests, save_checkpoint
from diloco.training.initial_state import DOCUMENT_WAIT_S, newest_state, read_document
from tests.diloco.bucket_world import StillClock

MakeGroup = Callable[..., Any]
Spoil = Callable[[str, bytes], bytes]


def flipped(data: bytes, spot: int = 0) -> bytes:
    spot %= len(data)
    return data[:spot] + bytes([data[spot] ^ 0x10]) + data[spot + 1 :]


def the_first_reads(pattern: str, times: int, change: Callable[[bytes], bytes]) -> Spoil:
    """Of each key like ``pattern``, the first reads are wrong and later ones right."""
    seen: Counter[str] = Counter()

    def spoil(key: str, data: bytes) -> bytes:
        if not fnmatch.fnmatch(key, pattern):
            return data
        seen[key] += 1
        return change(data) if seen[key] <= times else data

    return spoil


EVERYTHING = ["rounds/*.bin", "rounds/*/reduced/*", "*.json", "checkpoints/*.safetensors"]


@pytest.mark.parametrize("pattern", EVERYTHING)
@pytest.mark.parametrize("plan", ["gather", "sharded"])
def test_a_read_that_is_damaged_once_costs_nothing(
    tiny_group: MakeGroup, pattern: str, plan: str
) -> None:
    group = tiny_group(num_replicas=2, min_quorum=2, reduce_plan=plan, checkpoint_every=1)
    members = [
        group.start(n, spoil_reads=the_first_reads(pattern, READS - 1, flipped)) for n in range(2)
    ]
    group.wait()
    group.assert_agreed(*members)
    assert [bool(commit.void) for commit in group.assert_log()] == [False] * 4


def test_reads_that_are_damaged_by_chance_cost_no_round(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=3, min_quorum=3, total_rounds=6, checkpoint_every=1)

    def by_chance(seed: int) -> Spoil:
        rng = random.Random(seed)
        return lambda key, data: flipped(data) if data and rng.random() < 0.03 else data

    members = [group.start(n, spoil_reads=by_chance(n)) for n in range(3)]
    group.wait()
    group.assert_agreed(*members)
    assert group.assert_log()[-1].committed_total == 6


def test_an_upload_that_is_damaged_is_noticed_by_its_owner_and_made_again(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tiny_group(num_replicas=2, min_quorum=2)
    key = "rounds/00000002/contributions/00000.*.bin"
    uploads: list[str] = []
    store_stream = LocalStore.put_stream

    def damaged_once(self: LocalStore, name: str, make_parts: Any) -> None:
        if fnmatch.fnmatch(name, key) and not any(fnmatch.fnmatch(n, key) for n in uploads):
            uploads.append(name)
            self.put(name, flipped(b"".join(map(bytes, make_parts())), -1))
            return
        uploads.append(name)
        store_stream(self, name, make_parts)

    monkeypatch.setattr(LocalStore, "put_stream", damaged_once)
    members = [group.start(n) for n in range(2)]
    group.wait()
    group.assert_agreed(*members)
    assert not any(commit.void for commit in group.commits())
    assert sum(fnmatch.fnmatch(name, key) for name in uploads) == 2


# -- records ----------------------------------------------------------------------------------


COMMAND = Command(n=1, command="stop", wall_s=1700000000.25)


def test_a_flipped_bit_anywhere_in_a_record_is_noticed() -> None:
    data = COMMAND.to_bytes()
    for spot in range(len(data)):
        for bit in range(8):
            damaged = data[:spot] + bytes([data[spot] ^ 1 << bit]) + data[spot + 1 :]
            try:
                found = Command.from_bytes(damaged)
            except BadRecord:
                continue
            assert found == COMMAND, "blanks read the same"


def test_a_record_that_is_cut_short_is_noticed_or_whole() -> None:
    data = COMMAND.to_bytes()
    for length in range(len(data)):
        try:
            assert Command.from_bytes(data[:length]) == COMMAND
        except BadRecord:
            continue


def test_a_record_without_a_seal_is_read_and_a_sealed_one_is_plain_json() -> None:
    data = COMMAND.to_bytes()
    assert Command.from_bytes(data.rstrip()) == COMMAND
    assert json.loads(data)["command"] == "stop"


def test_a_beat_of_a_replica_that_is_not_blocked_has_only_the_fields_that_all_readers_know() -> (
    None
):
    beat = Beat(
        replica=0, incarnation="00001-ffffffff", count=1, interval_s=1.0, state="computing",
        round=1, step=0, tokens=0, started_wall_s=0.0, wall_s=0.0,
    )  # fmt: skip
    assert b"blocked" not in beat.to_bytes()


def test_a_record_that_stays_damaged_or_is_anothers_is_named(tmp_path: Any) -> None:
    store = LocalStore(tmp_path)
    store.put(keys.control(1), flipped(COMMAND.to_bytes(), 5))
    store.put(keys.control(2), COMMAND.to_bytes())
    for number in (1, 2):
        with pytest.raises(Damaged, match=keys.control(number)):
            read_record(store, keys.control(number), Command, is_right=lambda c, n=number: c.n == n)


def test_a_damaged_group_document_is_read_again(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=1)
    member = group.start(0, spoil_reads=the_first_reads(keys.GROUP, READS - 1, flipped))
    assert read_document(group.store) is not None
    group.wait()
    group.assert_agreed(member)


class Garbling(LocalStore):
    """Its first ``times`` reads are damaged, each at another place."""

    def __init__(self, root: Any, times: float) -> None:
        super().__init__(root)
        self.times, self.reads = times, 0

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.reads += 1
        data = super().get(key, limit=limit)
        return flipped(data, self.reads) if self.reads <= self.times else data


DOCUMENT = GroupDocument(
    run_id="0" * 16, name="x", settings=GroupSettings(), workload={"kind": "caller"}
)


def test_a_group_document_whose_reads_are_damaged_otherwise_each_time_is_waited_for(
    tmp_path: Any,
) -> None:
    store, clock = Garbling(tmp_path, times=20), StillClock()
    store.put(keys.GROUP, DOCUMENT.to_bytes())
    assert read_document(store, clock=clock) == DOCUMENT
    assert store.reads == 21 and len(clock.slept) == 20


def test_a_group_document_that_never_arrives_undamaged_is_named(tmp_path: Any) -> None:
    store, clock = Garbling(tmp_path, times=float("inf")), StillClock()
    store.put(keys.GROUP, DOCUMENT.to_bytes())
    with pytest.raises(SettingsError, match=f"{keys.GROUP}: expected to read it undamaged within"):
        read_document(store, clock=clock)
    assert sum(clock.slept) >= DOCUMENT_WAIT_S


def test_a_group_document_that_is_damaged_in_the_store_is_named_soon(tmp_path: Any) -> None:
    store, clock = LocalStore(tmp_path), StillClock()
    store.put(keys.GROUP, flipped(DOCUMENT.to_bytes(), 100))
    with pytest.raises(SettingsError, match=keys.GROUP):
        read_document(store, clock=clock)
    assert sum(clock.slept) < 1


def test_a_record_whose_reads_are_damaged_otherwise_each_time_is_read_on(tmp_path: Any) -> None:
    store = Garbling(tmp_path, times=READS + 2)
    store.put(keys.control(1), COMMAND.to_bytes())
    assert read_record(store, keys.control(1), Command) == COMMAND
    store.reads, store.times = 0, float("inf")
    with pytest.raises(Damaged, match=keys.control(1)):
        read_record(store, keys.control(1), Command)
    assert store.reads == MOST_READS


# -- checkpoints ------------------------------------------------------------------------------


def write_checkpoints(store: Any, layout: Any, *rounds: int) -> None:
    for round in rounds:
        save_checkpoint(
            store, Identity(replica=0, incarnation="00001-00000000"), layout,
            round=round, weights=layout.read(), base_rounds=(round,), outer=outer_of(layout),
            totals=Totals(committed=round), wall_s=0.0,
        )  # fmt: skip


def outer_of(layout: Any) -> OuterOptimizer:
    return OuterOptimizer(lr=1.0, momentum=0.0, numel=layout.numel)


@pytest.mark.parametrize("which", ["manifest.json", "weights.safetensors", "outer.safetensors"])
def test_an_older_checkpoint_stands_in_for_a_damaged_one(tmp_path: Any, which: str) -> None:
    store, layout = LocalStore(tmp_path), Layout(nn.Linear(4, 2))
    write_checkpoints(store, layout, 2, 4)
    [key] = [i.key for i in store.list("checkpoints/00000004/") if i.key.endswith(which)]
    store.put(key, flipped(store.get(key), 40))
    restored = newest_state(store, layout, outer_of(layout), 0, StillClock(), lambda: None)
    assert restored.round == 2


def test_where_no_checkpoint_can_be_read_the_error_names_the_object_and_what_to_do(
    tmp_path: Any,
) -> None:
    store, layout = LocalStore(tmp_path), Layout(nn.Linear(4, 2))
    write_checkpoints(store, layout, 2)
    manifest = next(manifests(store))
    store.put(manifest.weights.key, b"damaged")
    with pytest.raises(ReplicaError, match=r"checkpoints/00000002/.*backup.*fork"):
        newest_state(store, layout, outer_of(layout), 1, StillClock(), lambda: None)
    with pytest.raises(ReplicaError):
        load_checkpoint(store, manifest, layout, outer_of(layout))


def test_a_commit_of_another_round_is_not_applied(tmp_path: Any, tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=1)
    group.start(0)
    group.wait()
    group.store.put(keys.commit(3), group.store.get(keys.commit(2)))
    with pytest.raises(Damaged, match=keys.commit(3)):
        read_record(group.store, keys.commit(3), Commit, is_right=lambda c: c.round == 3)
