"""A group that begins with another's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import fork, keys
from diloco.protocol.fork import CannotPlant, plant
from diloco.protocol.records import CheckpointManifest, StoredObject
from diloco.training.checkpoint import load_checkpoint, load_tensors

MakeGroups = Callable[..., Any]


def trained(make_groups: MakeGroups, **settings: Any) -> Any:
    group = make_groups("theirs", num_replicas=2, total_rounds=4, **settings)
    group.start(0)
    group.start(1)
    group.wait()
    group.assert_agreed(*group.members)
    return group


def manifest(group: Any, round: int) -> CheckpointManifest:
    return CheckpointManifest.from_bytes(group.store.get(keys.checkpoint_manifest(round)))


def copy(theirs: Any, ours: Any, round: int = 4, *, outer: bool = True) -> CheckpointManifest:
    return plant(
        theirs.store, round, ours.store,
        theirs=theirs.settings, ours=ours.settings, outer=outer, wall_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("outer", [True, False])
def test_the_new_group_begins_with_weights_and_outer_state_and_counts_anew(
    make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch, outer: bool
) -> None:
    monkeypatch.setattr(fork, "PART_BYTES", 13)  # parts end within what is laid over
    theirs = trained(make_groups)
    ours = make_groups("ours", num_replicas=2, total_rounds=3)
    copy(theirs, ours, outer=outer)
    layout = Layout(nn.Linear(4, 2))
    momentum = OuterOptimizer(lr=0.7, momentum=0.9, numel=layout.numel)
    found = load_checkpoint(ours.store, manifest(ours, 0), layout, momentum)
    before = load_tensors(theirs.store, manifest(theirs, 4).outer)
    assert torch.equal(found.weights, layout.join(dict(theirs.members[0].model.state_dict())))
    assert (found.round, found.totals.committed, found.totals.tokens) == (0, 0, 0)
    assert int(before["committed_total"]) == 4
    assert before["momentum"].any()
    expected = before["momentum"] if outer else torch.zeros(layout.numel)
    assert torch.equal(momentum.buffer, expected)
    ours.start(0)
    ours.start(1)
    ours.wait()
    ours.assert_agreed(*ours.members)
    assert len(ours.assert_log()) == 3
    assert manifest(ours, 0).writer == manifest(theirs, 4).writer


def test_a_second_time_changes_nothing(make_groups: MakeGroups) -> None:
    theirs = trained(make_groups)
    ours = make_groups("ours")
    first = copy(theirs, ours)
    assert copy(theirs, ours) == first
    assert len(ours.store.list(keys.CHECKPOINTS)) == 3


def test_other_fragments_go_with_the_weights_alone(make_groups: MakeGroups) -> None:
    theirs = trained(make_groups)
    ours = make_groups("ours", num_fragments=2, sync_every=4, num_replicas=1, total_rounds=4)
    with pytest.raises(CannotPlant, match=r"goes with 1 fragments \(strided\), found 2"):
        copy(theirs, ours)
    copy(theirs, ours, outer=False)
    ours.start(0)
    ours.wait()
    assert ours.members[0].error is None
    assert len(ours.commits()) == 4


def test_a_checkpoint_that_is_swept_or_never_was_is_named(make_groups: MakeGroups) -> None:
    theirs = trained(make_groups)
    ours = make_groups("ours")
    for round in (0, 3):  # swept; never written
        with pytest.raises(CannotPlant, match=f"a checkpoint of round {round} under .*theirs"):
            copy(theirs, ours, round)
    assert ours.store.list(keys.CHECKPOINTS) == []


def test_damage_is_found_before_anything_names_the_copy(make_groups: MakeGroups) -> None:
    theirs = trained(make_groups)
    ours = make_groups("ours")
    weights = manifest(theirs, 4).weights
    data = theirs.store.get(weights.key)
    theirs.store.put(weights.key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CannotPlant, match=f"expected sha256 {weights.sha256}"):
        copy(theirs, ours)
    assert not any("manifest" in info.key for info in ours.store.list(keys.CHECKPOINTS))


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 16, (2).to_bytes(8, "little") + b"{}", (40).to_bytes(8, "little") + b"{" * 60],
)
def test_an_outer_state_that_is_none_is_refused(make_groups: MakeGroups, data: bytes) -> None:
    theirs = make_groups("theirs")
    theirs.store.put("outer", data)
    described = StoredObject(key="outer", size_bytes=len(data), sha256="")
    with pytest.raises(CannotPlant, match="outer: expected safetensors"):
        fork._zeroed_count(theirs.store, described)
