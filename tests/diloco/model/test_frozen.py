"""Frozen parameters: compared by digest at a join, and stored only if the caller chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.errors import ModelMismatch
from diloco.model.flat_parameters import Layout
from diloco.protocol import keys
from diloco.protocol.fork import fork_checkpoint
from diloco.protocol.records import CheckpointManifest, Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from diloco.training.checkpoint import load_tensors, newest_manifest, read_final
from diloco.training.initial_state import write_first
from diloco.training.join_options import Publish
from diloco.training.local_progress import LocalProgress
from diloco.training.model_check import check_model
from tests.diloco.clocks import FastClock, ManualClock

BASE = 1.2345678


class Adapted(nn.Module):
    """A frozen base of two layers with a trained correction and a scale."""

    def __init__(self, base: float = BASE) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.requires_grad_(False)
        nn.init.constant_(self.second.weight, base)
        nn.init.constant_(self.first.weight, 0.5)
        nn.init.zeros_(self.first.bias)
        nn.init.zeros_(self.second.bias)
        self.correction = nn.Parameter(torch.zeros(2))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x)) * self.scale + self.correction
        return result


def manifest_of(folder: Path, model: nn.Module) -> CheckpointManifest:
    """Write checkpoint 0 of a model and return its manifest."""
    store, me = LocalStore(folder), Identity(replica=3, incarnation="00001-cc430e64")
    settings, clock = GroupSettings(), ManualClock()
    state = LocalProgress(me, settings, Layout(model), clock).state
    write_first(store, me, state, clock)
    return CheckpointManifest.read(store, keys.checkpoint_manifest(0))


def test_other_frozen_values_are_refused_by_name(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, Adapted())
    assert manifest.frozen is not None
    assert [entry.name for entry in manifest.frozen] == [
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    ]
    check_model(manifest, Layout(Adapted()))
    with pytest.raises(ModelMismatch) as refused:
        check_model(manifest, Layout(Adapted(base=BASE + 2**-22)))
    message = str(refused.value)
    assert "parameter 2: expected second.weight [2, 4] float32, frozen, digest" in message
    assert "Load the base model of the group" in message and "as replica 3" in message


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.second.bfloat16(),
        lambda model: setattr(model, "more", nn.Parameter(torch.ones(1), requires_grad=False)),
        lambda model: delattr(model, "first"),
    ],
    ids=["dtype", "more", "fewer"],
)
def test_other_frozen_parameters_are_refused(
    tmp_path: Path, change: Callable[[Any], object]
) -> None:
    manifest, model = manifest_of(tmp_path, Adapted()), Adapted()
    change(model)
    with pytest.raises(ModelMismatch, match="expected the frozen parameters of the group's model"):
        check_model(manifest, Layout(model))


def test_values_that_are_not_in_memory_are_not_compared(tmp_path: Path) -> None:
    manifest, model = manifest_of(tmp_path, Adapted()), Adapted()
    model.second.to("meta")
    assert [entry.digest for entry in Layout(model).frozen][2:] == ["", ""]
    check_model(manifest, Layout(model))
    model.first = nn.Linear(4, 5).requires_grad_(False)
    with pytest.raises(ModelMismatch, match="parameter 0"):
        check_model(manifest, Layout(model))


def test_a_model_without_frozen_parameters_has_the_manifest_of_earlier_versions(
    tmp_path: Path,
) -> None:
    manifest = manifest_of(tmp_path, nn.Linear(4, 2))
    assert manifest.frozen is None
    assert b"frozen" not in LocalStore(tmp_path).get(keys.checkpoint_manifest(0))
    # A group of an earlier version has recorded nothing to compare with.
    check_model(replace(manifest_of(tmp_path / "a", Adapted()), frozen=None), Layout(Adapted(2.0)))


def test_each_replica_can_have_its_own_frozen_parameters(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "equal", Adapted())
    check_model(manifest, Layout(Adapted(2.0), compare_frozen=False))
    local = Layout(Adapted(), compare_frozen=False)
    assert local.frozen == ()


def train(uri: Path, model: nn.Module, publish: Publish = "model") -> diloco.Group:
    settings = diloco.GroupSettings(
        num_replicas=1, sync_every=2, total_rounds=2, warmup_steps=0, checkpoint_every=1
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with diloco.join(
        str(uri),
        model,
        optimizer,
        replica=0,
        settings=settings,
        publish=publish,
        clock=FastClock(),
    ) as group:
        while not group.done:
            loss = (model(torch.ones(1, 4)) - 1.0).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            group.step(tokens=1, loss=loss)
    return group


def stored(uri: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in uri.rglob("*") if path.is_file()}


def test_frozen_weights_never_leave_a_replica_that_publishes_what_is_exchanged(
    tmp_path: Path,
) -> None:
    model = Adapted()
    base = model.second.weight.detach().numpy().tobytes()[:16]
    assert train(tmp_path, model, "exchanged").reason == "completed"
    assert not [key for key, data in stored(tmp_path).items() if base in data]
    final = read_final(LocalStore(tmp_path))
    assert final is not None
    published = load_tensors(LocalStore(tmp_path), final.weights)
    assert list(published) == ["correction"]
    assert torch.equal(published["correction"], model.correction)
    with pytest.raises(ModelMismatch, match=r"second\.weight"):
        train(tmp_path, Adapted(base=BASE + 1.0))


def test_the_whole_model_is_published_by_default(tmp_path: Path) -> None:
    train(tmp_path, model := Adapted())
    final = read_final(LocalStore(tmp_path))
    assert final is not None
    assert load_tensors(LocalStore(tmp_path), final.weights).keys() == model.state_dict().keys()


def test_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="publish: expected 'model' or 'exchanged', found 'all'"):
        train(tmp_path, Adapted(), "all")  # type: ignore[arg-type]


def test_a_fork_compares_the_base_of_its_source(tmp_path: Path) -> None:
    train(tmp_path / "source", Adapted())
    settings = GroupSettings()
    copy = fork_checkpoint(
        LocalStore(tmp_path / "source"),
        2,
        LocalStore(tmp_path / "fork"),
        theirs=settings,
        ours=settings,
        outer=False,
        wall_s=0.0,
    )
    with pytest.raises(ModelMismatch, match=r"second\.weight"):
        check_model(copy, Layout(Adapted(base=2.0)))


def test_a_hostile_manifest_makes_no_long_error(tmp_path: Path) -> None:
    train(tmp_path, Adapted())
    manifest = newest_manifest(LocalStore(tmp_path))
    assert manifest is not None and manifest.frozen
    name = "\x1b[2J" + "x" * 1_000_000
    hostile = replace(manifest, frozen=(replace(manifest.frozen[0], name=name),))
    with pytest.raises(ModelMismatch, match=r"expected .\[2Jxxx") as refused:
        check_model(hostile, Layout(Adapted()))
    assert len(str(refused.value)) < 2000
    assert "\x1b" not in str(refused.value)
