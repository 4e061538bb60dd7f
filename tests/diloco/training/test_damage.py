"""Damage to one object never stops a run: it is read again, replaced or named in an error."""

from __future__ import annotations

import fnmatch
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from diloco.errors import DamagedObject, ReplicaError
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.model.outer_rules import COMMITTED_TOTAL
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.reading import MOST_READS, READS, Damaged, read_record
from diloco.protocol.records import BadRecord, Command, Commit, Heartbeat, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import LocalStore
from diloco.training.checkpoint import load_checkpoint, manifests, save_checkpoint
from diloco.training.initial_state import DOCUMENT_WAIT_S, TRY_AGAIN_S, newest_state, read_document
from diloco.training.stored_objects import put_tensors
from tests.diloco.clocks import ManualClock
from tests.matrix import matrix

MakeGroup = Callable[..., Any]
Spoil = Callable[[str, bytes], bytes]


def flipped(data: bytes, spot: int = 0) -> bytes:
    spot %= len(data)
    return data[:spot] + bytes([data[spot] ^ 0x10]) + data[spot + 1 :]


def the_first_reads(pattern: str, times: int, change: Callable[[bytes], bytes]) -> Spoil:
    """The first reads of each key that matches ``pattern`` are damaged."""
    seen: Counter[str] = Counter()

    def spoil(key: str, data: bytes) -> bytes:
        if not fnmatch.fnmatch(key, pattern):
            return data
        seen[key] += 1
        return change(data) if seen[key] <= times else data

    return spoil


EVERYTHING = ["rounds/*.bin", "rounds/*/reduced/*", "*.json", "checkpoints/*.safetensors"]


@pytest.mark.parametrize("pattern", EVERYTHING)
@matrix("plan", ["gather", "sharded"], fast=("sharded",))
def test_a_single_damaged_read_has_no_effect(
    tiny_group: MakeGroup, pattern: str, plan: str
) -> None:
    group = tiny_group(num_replicas=2, min_quorum=2, reduce_plan=plan, checkpoint_every=1)
    members = [
        group.start(n, spoil_reads=the_first_reads(pattern, READS - 1, flipped)) for n in range(2)
    ]
    group.wait()
    group.assert_agreed(*members)
    assert [bool(commit.void) for commit in group.assert_log()] == [False] * 4


def test_randomly_damaged_reads_lose_no_round(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=3, min_quorum=3, total_rounds=6, checkpoint_every=1)

    def by_chance(seed: int) -> Spoil:
        rng = random.Random(seed)
        return lambda key, data: flipped(data) if data and rng.random() < 0.03 else data

    members = [group.start(n, spoil_reads=by_chance(n)) for n in range(3)]
    group.wait()
    group.assert_agreed(*members)
    assert group.assert_log()[-1].committed_total == 6


def test_a_damaged_upload_is_detected_and_repeated(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tiny_group(num_replicas=2, min_quorum=2)
    key = "rounds/00000002/contributions/00000.*.bin"
    uploads: list[str] = []
    store_stream = LocalStore.put_stream

    def damaged_once(self: LocalStore, name: str, make_parts: Any, **hints: int) -> None:
        if fnmatch.fnmatch(name, key) and not any(fnmatch.fnmatch(n, key) for n in uploads):
            uploads.append(name)
            self.put(name, flipped(b"".join(map(bytes, make_parts())), -1))
            return
        uploads.append(name)
        store_stream(self, name, make_parts, **hints)

    monkeypatch.setattr(LocalStore, "put_stream", damaged_once)
    members = [group.start(n) for n in range(2)]
    group.wait()
    group.assert_agreed(*members)
    assert not any(commit.void for commit in group.commits())
    assert sum(fnmatch.fnmatch(name, key) for name in uploads) == 2


# -- records ----------------------------------------------------------------------------------


COMMAND = Command(n=1, command="stop", wall_s=1700000000.25)


def test_a_flipped_bit_in_a_record_is_detected() -> None:
    data = COMMAND.to_bytes()
    for spot in range(len(data)):
        for bit in range(8):
            damaged = data[:spot] + bytes([data[spot] ^ 1 << bit]) + data[spot + 1 :]
            try:
                result = Command.from_bytes(damaged)
            except BadRecord:
                continue
            assert result == COMMAND, "blanks read the same"


def test_a_truncated_record_is_detected() -> None:
    data = COMMAND.to_bytes()
    for length in range(len(data)):
        try:
            assert Command.from_bytes(data[:length]) == COMMAND
        except BadRecord:
            continue


def test_records_without_a_checksum_are_read_and_all_are_plain_json() -> None:
    data = COMMAND.to_bytes()
    assert Command.from_bytes(data.rstrip()) == COMMAND
    assert json.loads(data)["command"] == "stop"


def test_heartbeats_omit_blocked_unless_it_is_set() -> None:
    beat = Heartbeat(
        replica=0,
        incarnation="00001-ffffffff",
        count=1,
        interval_s=1.0,
        state="computing",
        round=1,
        step=0,
        tokens=0,
        started_wall_s=0.0,
        wall_s=0.0,
    )
    assert b"blocked" not in beat.to_bytes()


def test_a_permanently_damaged_or_misplaced_record_is_named(tmp_path: Any) -> None:
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
    """The first ``times`` reads are damaged, each at another position."""

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


def test_a_group_document_with_differing_damaged_reads_is_retried(
    tmp_path: Any,
) -> None:
    store, clock = Garbling(tmp_path, times=20), ManualClock()
    store.put(keys.GROUP, DOCUMENT.to_bytes())
    assert read_document(store, clock=clock) == DOCUMENT
    assert store.reads == 21 and len(clock.pauses) == 20


def test_a_group_document_that_is_never_read_undamaged_is_an_error(tmp_path: Any) -> None:
    store, clock = Garbling(tmp_path, times=float("inf")), ManualClock()
    store.put(keys.GROUP, DOCUMENT.to_bytes())
    with pytest.raises(SettingsError, match=f"{keys.GROUP}: expected to read it undamaged within"):
        read_document(store, clock=clock)
    assert sum(clock.pauses) >= DOCUMENT_WAIT_S


def test_a_group_document_damaged_in_the_store_fails_quickly(tmp_path: Any) -> None:
    store, clock = LocalStore(tmp_path), ManualClock()
    store.put(keys.GROUP, flipped(DOCUMENT.to_bytes(), 100))
    with pytest.raises(SettingsError, match=keys.GROUP):
        read_document(store, clock=clock)
    assert sum(clock.pauses) < 1


def test_a_record_with_differing_damaged_reads_is_retried(tmp_path: Any) -> None:
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
            store,
            Identity(replica=0, incarnation="00001-00000000"),
            layout,
            round=round,
            weights=layout.read(),
            base_rounds=(round,),
            outer=outer_of(layout),
            totals=Totals(committed=round),
            wall_s=0.0,
        )


def outer_of(layout: Any) -> OuterOptimizer:
    return OuterOptimizer(lr=1.0, momentum=0.0, numel=layout.numel)


@pytest.mark.parametrize("which", ["manifest.json", "weights.safetensors", "outer.safetensors"])
def test_an_older_checkpoint_replaces_a_damaged_one(tmp_path: Any, which: str) -> None:
    store, layout = LocalStore(tmp_path), Layout(nn.Linear(4, 2))
    write_checkpoints(store, layout, 2, 4)
    [key] = [i.key for i in store.list("checkpoints/00000004/") if i.key.endswith(which)]
    store.put(key, flipped(store.get(key), 40))
    restored = newest_state(store, layout, outer_of(layout), 0, ManualClock(), lambda: None)
    assert restored.round == 2


def test_a_replica_names_the_only_manifest_if_it_stays_damaged(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layout, read = LocalStore(tmp_path), Layout(nn.Linear(4, 2)), Counter[str]()
    write_checkpoints(store, layout, 0)
    key = keys.checkpoint_manifest(0)
    store.put(key, flipped(store.get(key), 40))
    get = LocalStore.get

    def counted(store: LocalStore, key: str, **limits: Any) -> bytes:
        read[key] += 1
        return get(store, key, **limits)

    monkeypatch.setattr(LocalStore, "get", counted)
    with pytest.raises(ReplicaError, match=f"found none; {key} is damaged: .*Restore the damaged"):
        newest_state(store, layout, outer_of(layout), 0, ManualClock(), lambda: None, wait_s=100.0)
    assert read[key] <= READS * 100.0 / TRY_AGAIN_S


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"weight": None}, "expected a tensor 'weight', found none"),
        ({"bias": torch.zeros(3)}, r"bias: expected torch.float32 of \[2\], found .* of \[3\]"),
        ({"bias": torch.zeros(2).half()}, "bias: expected torch.float32 .*, found torch.float16"),
        ({"more": torch.zeros(1)}, "more: expected no such tensor"),
    ],
)
def test_an_older_checkpoint_replaces_one_with_other_tensors(
    tmp_path: Any, changed: dict[str, Any], words: str
) -> None:
    store, layout = LocalStore(tmp_path), Layout(nn.Linear(4, 2))
    write_checkpoints(store, layout, 2, 4)
    manifest = next(manifests(store))
    tensors = {**layout.split(layout.read()), **changed}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    odd = replace(manifest, weights=put_tensors(store, manifest.weights.key, present))
    store.put(keys.checkpoint_manifest(4), odd.to_bytes())
    with pytest.raises(DamagedObject, match=f"{manifest.weights.key}: {words}"):
        load_checkpoint(store, odd, layout, outer_of(layout))
    restored = newest_state(store, layout, outer_of(layout), 0, ManualClock(), lambda: None)
    assert restored.round == 2


@pytest.mark.parametrize("count", [torch.tensor(float("nan")), torch.tensor(-1)])
def test_an_older_checkpoint_replaces_one_without_a_count_of_rounds(
    tmp_path: Any, count: torch.Tensor
) -> None:
    store, layout = LocalStore(tmp_path), Layout(nn.Linear(4, 2))
    write_checkpoints(store, layout, 2, 4)
    manifest, outer = next(manifests(store)), outer_of(layout)
    assert manifest.outer is not None
    tensors = {**outer.vectors, COMMITTED_TOTAL: count}
    odd = replace(manifest, outer=put_tensors(store, manifest.outer.key, tensors))
    store.put(keys.checkpoint_manifest(4), odd.to_bytes())
    assert newest_state(store, layout, outer, 0, ManualClock(), lambda: None).round == 2


@pytest.mark.parametrize("base_rounds", [(), (4, 4), (5,), (-1,)])
def test_an_older_checkpoint_replaces_one_of_other_fragments(
    tmp_path: Any, base_rounds: tuple[int, ...]
) -> None:
    store, layout = LocalStore(tmp_path), Layout(nn.Linear(4, 2))
    write_checkpoints(store, layout, 2, 4)
    odd = replace(next(manifests(store)), base_rounds=base_rounds)
    store.put(keys.checkpoint_manifest(4), odd.to_bytes())
    outer = outer_of(layout)
    assert newest_state(store, layout, outer, 0, ManualClock(), lambda: None).round == 2


def test_a_damaged_checkpoint_does_not_change_the_outer_state(tmp_path: Any) -> None:
    store, layout = LocalStore(tmp_path), Layout(nn.Linear(4, 2))
    write_checkpoints(store, layout, 2)
    manifest = next(manifests(store))
    assert manifest.outer is not None
    store.put(manifest.outer.key, flipped(store.get(manifest.outer.key), -1))
    outer = outer_of(layout)
    vector = outer.vectors["momentum"].fill_(5.0)
    with pytest.raises(DamagedObject, match=manifest.outer.key):
        load_checkpoint(store, manifest, layout, outer)
    assert outer.vectors["momentum"] is vector and vector.eq(5.0).all()


def test_the_outer_state_of_another_rule_is_refused(tmp_path: Any) -> None:
    store, layout = LocalStore(tmp_path), Layout(nn.Linear(4, 2))
    write_checkpoints(store, layout, 2)
    manifest = next(manifests(store))
    outer = outer_of(layout)
    outer.vectors["variance"] = torch.zeros(layout.numel)
    with pytest.raises(ReplicaError, match=r"expected 10 elements of 'variance', .* found none"):
        load_checkpoint(store, manifest, layout, outer)


def test_without_a_readable_checkpoint_the_error_names_object_and_remedy(
    tmp_path: Any,
) -> None:
    store, layout = LocalStore(tmp_path), Layout(nn.Linear(4, 2))
    write_checkpoints(store, layout, 2)
    manifest = next(manifests(store))
    store.put(manifest.weights.key, b"damaged")
    with pytest.raises(ReplicaError, match=r"checkpoints/00000002/.*backup.*fork"):
        newest_state(store, layout, outer_of(layout), 1, ManualClock(), lambda: None)
    with pytest.raises(ReplicaError):
        load_checkpoint(store, manifest, layout, outer_of(layout))


def test_a_commit_of_another_round_is_not_applied(tmp_path: Any, tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=1)
    group.start(0)
    group.wait()
    group.store.put(keys.commit(3), group.store.get(keys.commit(2)))
    with pytest.raises(Damaged, match=keys.commit(3)):
        read_record(group.store, keys.commit(3), Commit, is_right=lambda c: c.round == 3)
