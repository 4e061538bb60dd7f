"""Frozen parameters: compared by digest at a join, and stored only if the caller chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.errors import ModelMismatch, SettingsMismatch
from diloco.model.flat_parameters import Layout
from diloco.protocol import keys
from diloco.protocol.fork import ForkError, fork_checkpoint
from diloco.protocol.records import CheckpointManifest, Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from diloco.training.checkpoint import newest_manifest
from diloco.training.final_result import read_final
from diloco.training.initial_state import write_first
from diloco.training.join_options import Publish
from diloco.training.local_progress import LocalProgress
from diloco.training.model_check import check_model
from diloco.training.stored_objects import load_tensors
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


def manifest_of(folder: Path, model: nn.Module, frozen: str = "equal") -> CheckpointManifest:
    """Write checkpoint 0 of a model and return its manifest."""
    store, me = LocalStore(folder), Identity(replica=3, incarnation="00001-cc430e64")
    settings, clock = GroupSettings(frozen=frozen), ManualClock()
    layout = Layout(model, compare_frozen=frozen == "equal")
    state = LocalProgress(me, settings, layout, clock).state
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


def test_digests_that_one_replica_does_not_have_are_kept_for_later_ones(tmp_path: Path) -> None:
    manifest, model = manifest_of(tmp_path, Adapted()), Adapted()
    model.first.to("meta")
    check_model(manifest, layout := Layout(model))
    assert layout.frozen == manifest.frozen
    other = Adapted(base=2.0)
    other.first.to("meta")
    with pytest.raises(ModelMismatch, match=r"parameter 2: expected second\.weight"):
        check_model(manifest, Layout(other))


def test_a_replica_with_frozen_parameters_cannot_join_a_model_without(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, nn.ParameterDict({"correction": torch.zeros(2)}))
    assert manifest.frozen == ()
    with pytest.raises(ModelMismatch, match=r"expected none \(of 0 parameters\), found first"):
        check_model(manifest, Layout(Adapted()))


def test_a_checkpoint_of_an_earlier_version_has_nothing_to_compare(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_model(replace(manifest_of(tmp_path, Adapted()), frozen=None), Layout(Adapted(2.0)))
    assert "does not describe frozen parameters" in caplog.text


def test_local_compares_names_shapes_and_dtypes_without_values(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, Adapted(), frozen="local")
    assert manifest.frozen is not None
    assert {entry.digest for entry in manifest.frozen} == {""}
    check_model(manifest, Layout(Adapted(2.0), compare_frozen=False))
    other = Adapted()
    other.second.bfloat16()
    with pytest.raises(ModelMismatch) as refused:
        check_model(manifest, Layout(other, compare_frozen=False))
    message = str(refused.value)
    assert "parameter 2: expected second.weight [2, 4] float32, frozen (of 4" in message
    assert "keep the part that differs outside of the model" in message


@pytest.mark.parametrize(("frozen", "is_refused"), [("equal", True), ("local", False)])
def test_the_group_decides_whether_a_later_replica_can_have_another_base(
    tmp_path: Path, frozen: str, is_refused: bool
) -> None:
    diloco.create_group(str(tmp_path), GroupSettings(frozen=frozen, **ONE_REPLICA))
    train(tmp_path, Adapted(), settings=None)
    with pytest.raises(ModelMismatch) if is_refused else contextlib.nullcontext():
        train(tmp_path, Adapted(base=2.0), settings=None)
    settings = GroupSettings(frozen="local" if is_refused else "equal", **ONE_REPLICA)
    with pytest.raises(SettingsMismatch, match=f"frozen: expected {settings.frozen}, found"):
        train(tmp_path, Adapted(), settings=settings)


ONE_REPLICA: dict[str, Any] = {
    "num_replicas": 1,
    "sync_every": 2,
    "total_rounds": 2,
    "warmup_steps": 0,
    "checkpoint_every": 1,
}
SETTINGS = GroupSettings(**ONE_REPLICA)


def train(
    uri: Path,
    model: nn.Module,
    publish: Publish = "model",
    settings: GroupSettings | None = SETTINGS,
) -> diloco.Group:
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
    equal, local = GroupSettings(), GroupSettings(frozen="local")

    def fork(theirs: GroupSettings, ours: GroupSettings) -> CheckpointManifest:
        source, into = LocalStore(tmp_path / "source"), LocalStore(tmp_path / "fork")
        return fork_checkpoint(source, 2, into, theirs=theirs, ours=ours, outer=False, wall_s=0.0)

    with pytest.raises(ModelMismatch, match=r"second\.weight"):
        check_model(fork(equal, equal), Layout(Adapted(base=2.0)))
    check_model(fork(equal, local), Layout(Adapted(base=2.0), compare_frozen=False))
    with pytest.raises(ForkError, match="frozen: expected 'local' as in the source"):
        fork(local, equal)


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
