"""Errors and warnings of ``join`` and ``step``, and the command lines."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import diloco
from diloco.clock import Clock
from diloco.errors import ModelMismatch, ReplicaError
from diloco.exchange.step_accounting import StepCounter
from diloco.init import create_group, main, replace_model
from diloco.model import named_parameters
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.preflight import preflight
from diloco.protocol import keys
from diloco.protocol.records import Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore, StoreUnavailable
from diloco.store.uris import check_rendezvous
from diloco.torchft.configuration import find_store
from diloco.training.checkpoint import save_checkpoint
from diloco.training.initial_state import newest_state
from tests.diloco.clocks import FastClock

ME = Identity(replica=3, incarnation="00001-00000001")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("", "expected a URI or a folder"),
        ("   ", "expected a URI or a folder"),
        (" s3://b/x", "expected a URI or a folder"),
        ("s3//b/x", "expected s3://"),
        ("s3:/b/x", "expected s3://"),
        ("S3//b/x", "expected s3://"),
        ("gs//b", "expected gs://"),
        ("runs/x", "expected an absolute folder or a URI"),
        ("./x", "expected an absolute folder or a URI"),
        ("s4://b/x", "expected a scheme of s3"),
        ("http://b/x", "expected a scheme of s3"),
        ("s3:///x", "expected a bucket after s3://"),
        ("file://host/x", "expected file:///absolute/folder"),
        ("file://x", "expected file:///absolute/folder"),
    ],
)
def test_a_rendezvous_that_is_not_shared_is_refused(uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        find_store(uri, None)
    assert "Enter a URI such as" in str(refused.value)


def test_folders_and_buckets_are_accepted(tmp_path: Path) -> None:
    for uri in ("s3://b", "gs://b/x", "/mnt/x", "file:///mnt/x", tmp_path.as_uri()):
        assert check_rendezvous(uri) == uri
    assert check_rendezvous("runs/x", relative=True) == "runs/x"
    with pytest.raises(ValueError, match="expected s3://"):
        check_rendezvous("s3//b/x", relative=True)


def test_join_refuses_a_misspelt_bucket() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="expected s3://"):
        diloco.join("s3//b/x", model=model, inner_optimizer=optimizer, replica=0)


def test_a_group_of_own_loops_needs_no_warm_up(tmp_path: Path) -> None:
    short = ["--sync-every", "10", "--total-rounds", "5"]
    assert main([str(tmp_path / "own"), "--own-loop", *short]) == 0
    assert main([str(tmp_path / "built-in"), *short]) == 1


# -- the model -----------------------------------------------------------------------------------


def model_of(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(n, m) for n, m in pairwise(sizes)))


def described(store: LocalStore, model: nn.Module) -> None:
    layout = Layout(model)
    outer = OuterOptimizer(lr=1.0, momentum=0.9, numel=layout.numel)
    save_checkpoint(
        store,
        ME,
        layout,
        round=0,
        weights=layout.read(),
        base_rounds=(0,),
        outer=outer,
        totals=Totals(),
        wall_s=0.0,
    )


def mismatch(store: LocalStore, model: nn.Module, clock: Clock) -> str:
    layout = Layout(model)
    outer = OuterOptimizer(lr=1.0, momentum=0.9, numel=layout.numel)
    with pytest.raises(ModelMismatch) as error:
        newest_state(store, layout, outer, 0, clock, lambda: None)
    return str(error.value)


def test_a_mismatch_names_the_first_parameter_that_differs(tmp_path: Path) -> None:
    store, clock = LocalStore(tmp_path), FastClock()
    described(store, model_of(4, 3, 2))
    message = mismatch(store, model_of(4, 3, 5), clock)
    assert "parameter 2: expected 1.weight [2, 3] float32 (of 4 parameters)" in message
    assert "found 1.weight [5, 3] float32 (of 4), and 1 more differ" in message
    assert "Replica 3 joined first" in message
    assert "--replace-model" in message
    message = mismatch(store, model_of(4, 3), clock)
    assert "parameter 2: expected 1.weight [2, 3] float32 (of 4 parameters), found none" in message


def test_a_wrong_first_model_can_be_replaced_before_the_first_commit(tmp_path: Path) -> None:
    create_group(str(tmp_path), GroupSettings())
    store, clock = LocalStore(tmp_path), FastClock()
    described(store, model_of(4, 3))
    replace_model(store, clock=clock)
    assert store.list(keys.CHECKPOINTS) == []
    described(store, model_of(4, 2))
    store.put(keys.commit(1), b"{}")
    with pytest.raises(ReplicaError, match="expected no committed round"):
        replace_model(store, clock=clock)


def test_an_optimizer_of_another_model_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model, other = model_of(4, 3, 2), model_of(4, 3, 2)
    with pytest.raises(ValueError, match="found none of its 4"):
        named_parameters.check_optimizers(model, [torch.optim.SGD(other.parameters(), 0.1)])
    named_parameters.check_optimizers(model, [torch.optim.SGD(model.parameters(), 0.1)])
    assert not caplog.records
    named_parameters.check_optimizers(model, [torch.optim.SGD(model[0].parameters(), 0.1)])
    assert "2 trained parameters are in no inner optimizer" in caplog.text


def test_parameters_unfrozen_after_the_join_are_an_error() -> None:
    model = model_of(4, 3, 2)
    model[1].requires_grad_(False)
    names = frozenset(name for name, _ in named_parameters.trained(model))
    named_parameters.check_trained(model, names)
    model[1].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"found 1 more: 1\.weight"):
        named_parameters.check_trained(model, names)


def test_parameters_frozen_after_the_join_are_an_error() -> None:
    model = model_of(4, 3, 2)
    names = frozenset(name for name, _ in named_parameters.trained(model))
    model[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"2 without requires_grad: 1\.bias, 1\.weight\."):
        named_parameters.check_trained(model, names)


@pytest.mark.parametrize("loss", [torch.ones(8), torch.ones(2, 1), torch.ones(0)])
def test_a_loss_that_is_no_scalar_is_refused_with_its_shape(loss: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"loss: expected a scalar.*shape \(.*loss\.mean\(\)"):
        StepCounter(FastClock()).count(tokens=1, loss=loss)
    StepCounter(FastClock()).count(tokens=1, loss=torch.ones(1, 1))


def test_a_negative_count_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens: expected 0 or more, found -1"):
        StepCounter(FastClock()).count(tokens=-1, loss=1.0)


def test_a_step_without_tokens_is_a_warning_to_the_caller(tmp_path: Path) -> None:
    settings = GroupSettings(num_replicas=1, sync_every=2, total_rounds=2, warmup_steps=0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        diloco.join(
            str(tmp_path), model=model, inner_optimizer=optimizer, replica=0, settings=settings
        ) as group,
        pytest.warns(UserWarning, match="step 0 has tokens=0.*Pass the tokens") as shown,
    ):
        while not group.done:
            group.step(tokens=0, loss=1.0)
    assert len(shown) == 1 and shown[0].filename == __file__
    assert group.reason == "completed"


# -- command lines -------------------------------------------------------------------------------


def test_dir_lists_the_public_names() -> None:
    assert set(diloco.__all__) <= set(dir(diloco))
    assert "join" in dir(diloco)


@pytest.mark.parametrize(
    "command",
    ["export", "generate", "init", "inspect", "preflight", "replica", "simulate", "syncer"],
)
def test_every_command_has_a_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"diloco.{command}").main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"archipelago-diloco {diloco.__version__}\n"


def test_no_network_is_not_a_missing_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: LocalStore, key: str, data: bytes) -> None:
        raise StoreUnavailable(f"{key}: connection refused")

    monkeypatch.setattr(LocalStore, "put", away)
    check = preflight(str(tmp_path)).missing[0]
    assert "check network, endpoint and proxy" in check.needs
