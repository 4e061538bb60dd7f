"""A group that starts from another group's checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import fork, keys
from diloco.protocol.fork import ForkError, fork_checkpoint
from diloco.protocol.object_digest import ObjectDigest
from diloco.protocol.pieces import piece_key
from diloco.protocol.records import CheckpointManifest, StoredObject
from diloco.training.checkpoint import load_checkpoint
from diloco.training.stored_objects import load_tensors

MakeGroups = Callable[..., Any]


def trained(make_groups: MakeGroups, **settings: Any) -> Any:
    group = make_groups("source", num_replicas=2, total_rounds=4, **settings)
    group.start(0)
    group.start(1)
    group.wait()
    group.assert_agreed(*group.members)
    return group


def manifest(group: Any, round: int) -> CheckpointManifest:
    return CheckpointManifest.from_bytes(group.store.get(keys.checkpoint_manifest(round)))


def copy(source: Any, target: Any, round: int = 4, *, outer: bool = True) -> CheckpointManifest:
    return fork_checkpoint(
        source.store,
        round,
        target.store,
        theirs=source.settings,
        ours=target.settings,
        outer=outer,
        wall_s=0.0,
    )


@pytest.mark.parametrize("outer", [True, False])
def test_a_fork_copies_weights_and_outer_state_and_resets_counts(
    make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch, outer: bool
) -> None:
    monkeypatch.setattr(fork, "PART_BYTES", 13)  # part boundaries within the patch
    source = trained(make_groups)
    target = make_groups("fork", num_replicas=2, total_rounds=3)
    copy(source, target, outer=outer)
    layout = Layout(nn.Linear(4, 2))
    momentum = OuterOptimizer(lr=0.7, momentum=0.9, numel=layout.numel)
    result = load_checkpoint(target.store, manifest(target, 0), layout, momentum)
    before = load_tensors(source.store, manifest(source, 4).outer)
    assert torch.equal(result.weights, layout.join(dict(source.members[0].model.state_dict())))
    assert (result.round, result.totals.committed, result.totals.tokens) == (0, 0, 0)
    assert int(before["committed_total"]) == 4
    assert before["momentum"].any()
    expected = before["momentum"] if outer else torch.zeros(layout.numel)
    assert torch.equal(momentum.vectors["momentum"], expected)
    target.start(0)
    target.start(1)
    target.wait()
    target.assert_agreed(*target.members)
    assert len(target.assert_log()) == 3
    assert manifest(target, 0).writer == manifest(source, 4).writer


def test_a_fork_is_idempotent(make_groups: MakeGroups) -> None:
    source = trained(make_groups)
    target = make_groups("fork")
    first = copy(source, target)
    assert copy(source, target) == first
    assert len(target.store.list(keys.CHECKPOINTS)) == 3


def test_a_checkpoint_of_protocol_2_can_be_forked(make_groups: MakeGroups) -> None:
    source = trained(make_groups)
    key = keys.checkpoint_manifest(4)
    body = json.loads(source.store.get(key)) | {"v": 2}
    for stored in (body["weights"], body["outer"]):  # digests of version 2
        data = source.store.get(stored["key"])
        stored |= {"sha256": hashlib.sha256(data).hexdigest()}
        del stored["checksums"]
    source.store.put(key, json.dumps(body).encode())
    target = make_groups("fork")
    copy(source, target)
    assert json.loads(target.store.get(keys.checkpoint_manifest(0)))["v"] == 3


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_in_pieces_is_copied_to_one_object(
    make_groups: MakeGroups, damaged: bool
) -> None:
    source = trained(make_groups)
    found = manifest(source, 4)
    divided = {}
    for name in ("weights", "outer"):
        stored: StoredObject = getattr(found, name)
        data = source.store.get(stored.key)
        sizes = (len(data) - 8, 8)
        digest = ObjectDigest(pieces=sizes)
        digest.update(data)
        source.store.put(stored.key, data[:-8])
        source.store.put(piece_key(stored.key, 1), bytes(8) if damaged else data[-8:])
        divided[name] = replace(stored, pieces=sizes, checksums=digest.checksums)
    source.store.put(keys.checkpoint_manifest(4), replace(found, **divided).to_bytes())
    target = make_groups("fork")
    if damaged:
        with pytest.raises(ForkError, match="expected the digest"):
            copy(source, target)
        return
    copied = copy(source, target)
    assert copied.weights.pieces is None and copied.outer is not None
    before = load_tensors(source.store, divided["weights"])
    for name, tensor in load_tensors(target.store, copied.weights).items():
        assert torch.equal(tensor, before[name])
    assert load_tensors(target.store, copied.outer)["momentum"].any()


def test_other_fragments_require_a_fork_without_outer_state(make_groups: MakeGroups) -> None:
    source = trained(make_groups)
    target = make_groups("fork", num_fragments=2, sync_every=4, num_replicas=1, total_rounds=4)
    with pytest.raises(ForkError, match=r"expected 1 fragments \(strided\), found 2"):
        copy(source, target)
    copy(source, target, outer=False)
    target.start(0)
    target.wait()
    assert target.members[0].error is None
    assert len(target.commits()) == 4


def test_the_error_names_a_deleted_or_missing_checkpoint(make_groups: MakeGroups) -> None:
    source = trained(make_groups)
    target = make_groups("fork")
    for round in (0, 3):  # deleted; never written
        with pytest.raises(ForkError, match=f"a checkpoint of round {round} under .*source"):
            copy(source, target, round)
    assert target.store.list(keys.CHECKPOINTS) == []


def test_damage_is_detected_before_a_manifest_names_the_copy(make_groups: MakeGroups) -> None:
    source = trained(make_groups)
    target = make_groups("fork")
    weights = manifest(source, 4).weights
    data = source.store.get(weights.key)
    source.store.put(weights.key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ForkError, match=f"expected the digest {weights.digest}"):
        copy(source, target)
    assert not any("manifest" in info.key for info in target.store.list(keys.CHECKPOINTS))


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 16, (2).to_bytes(8, "little") + b"{}", (40).to_bytes(8, "little") + b"{" * 60],
)
def test_an_invalid_outer_state_is_refused(make_groups: MakeGroups, data: bytes) -> None:
    source = make_groups("source")
    source.store.put("outer", data)
    described = StoredObject(key="outer", size_bytes=len(data), sha256="")
    with pytest.raises(ForkError, match="outer: expected safetensors"):
        fork._zeroed_count(source.store, described)
