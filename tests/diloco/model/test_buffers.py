"""Buffers that training changes: refused, averaged or left to each replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.errors import ModelMismatch
from diloco.exchange.reduce import Merged
from diloco.model.buffers import BufferCheck
from diloco.model.flat_parameters import Layout
from diloco.protocol.payload_size import LOW_BIT_CODECS
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.training.checkpoint import Restored, newest_manifest
from diloco.training.late_share import Kept
from diloco.training.local_progress import LocalProgress
from tests.diloco.conftest import TinyGroup


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.outer = nn.Linear(3, 2)
        self.register_buffer("constant", torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache.add_(1.0)  # type: ignore[operator]
        result: Tensor = self.outer(self.norm(self.inner(x))) * self.constant
        return result


def step(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def test_a_changed_buffer_is_refused_with_what_to_enter() -> None:
    model = WithBuffers()
    check = BufferCheck(model, None, codec="fp32")
    check.check()
    model.eval()
    step(model)  # changes the cache only
    check.check()
    model.train()
    step(model)
    with pytest.raises(ValueError) as refused:
        check.check()
    message = str(refused.value)
    assert "found 2 that training has changed: norm.running_mean, norm.running_var" in message
    assert "Enter buffers='average' in join on all replicas" in message
    assert "buffers='local'" in message


def test_bf16_scalar_and_empty_buffers_are_compared() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))
    model.register_buffer("empty", torch.zeros(0))
    check = BufferCheck(model, None, codec="fp32")
    check.check()
    model.low[1] = 1.0  # type: ignore[index, operator]
    with pytest.raises(ValueError, match="changed: low"):
        check.check()


def test_local_buffers_can_change() -> None:
    model = WithBuffers()
    check = BufferCheck(model, "local", codec="topk")
    step(model)
    check.check()


def test_an_averaged_buffer_must_be_changed_in_place() -> None:
    model = WithBuffers()
    check = BufferCheck(model, "average", codec="fp32")
    step(model)
    check.check()
    model.norm.running_mean = torch.zeros(3)
    with pytest.raises(ValueError, match=r"other tensors for norm\.running_mean.*copy_"):
        check.check()


@pytest.mark.parametrize(
    ("choice", "codec", "mean_codec", "message"),
    [
        ("mean", "fp32", "full", "expected 'average' or 'local', found 'mean'"),
        ("average", "topk", "full", "expected another codec than topk"),
        ("average", "int8", "full", "expected another codec than int8.*negative"),
        ("average", "e3m0", "full", "expected another codec than e3m0"),
        ("average", "bf16", "int8", "expected another mean_codec than int8"),
    ],
)
def test_an_impossible_choice_is_refused(
    choice: Any, codec: str, mean_codec: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BufferCheck(WithBuffers(), choice, codec=codec, mean_codec=mean_codec)


@pytest.mark.parametrize("name", LOW_BIT_CODECS)
def test_a_refused_codec_makes_a_variance_negative(name: str) -> None:
    """The variances were 9.5 to 10.5 in the last round, and are 0.01 now."""
    codec, base = get_codec(name), torch.linspace(9.5, 10.5, 64)
    change = base - 0.01
    assert (base - codec.decode(codec.encode(change), 64)).min() < 0


@pytest.mark.parametrize(
    ("is_late", "bias"), [(False, 0.0), (True, 0.0), (True, 1.0)], ids=["overlap", "late", "along"]
)
def test_no_progress_is_added_to_an_averaged_buffer(is_late: bool, bias: float) -> None:
    """Both the group and this replica saw the variance fall from 10 to 1: adding its own progress
    to the group's would give -0.5 or less."""
    model = nn.BatchNorm1d(2)
    layout = Layout(model, buffers=True)
    settings = diloco.GroupSettings(sync_every=4, overlap_steps=2, mixing_alpha=0.5, warmup_steps=0)
    me = Identity(replica=0, incarnation="00001-00000000")
    other = Identity(replica=1, incarnation="00001-00000000")
    progress = LocalProgress(me, settings, layout, SystemClock())
    named = {"weight": torch.ones(2), "bias": torch.zeros(2), "running_mean": torch.zeros(2)}
    base = layout.join({**named, "running_var": torch.full((2,), 10.0)})
    restored = Restored(round=0, weights=base.clone(), base_rounds=(0,), totals=Totals())
    progress.state.load(restored, None)
    progress.counter.begin_round()
    opened = None
    if not is_late:
        progress.counter.count(tokens=1, loss=0.0)
        opened = progress.open(1, 0)
        assert opened is not None
        opened.sent = object()  # type: ignore[assignment]
    with torch.no_grad():
        model.running_var.fill_(1.0)  # type: ignore[union-attr]
        model.bias.fill_(-2.0)
    progress.counter.count(tokens=1, loss=0.0)
    commit = Commit(
        round=1,
        fragment=0,
        committer=me,
        contributors=(other if is_late else me,),
        void="",
        tokens_total=1,
        committed_total=1,
        wall_s=0.0,
    )
    zeros = {name: torch.zeros(2) for name in named}
    mean = {"running_var": torch.full((2,), 6.0), "bias": torch.full((2,), bias)}
    change = layout.join({**zeros, **mean})
    progress.apply(commit, Merged(vector=change, present=2 / 3), opened, keep=Kept(0.5))
    assert model.running_var.tolist() == [1.0, 1.0]  # type: ignore[union-attr, operator]
    assert progress.state.weights is not None
    kept = (layout.read() - progress.state.weights).tolist()
    progress_of_bias = 0.0 if bias else -2.0 if is_late else -1.0
    of_bias = {**zeros, "bias": torch.full((2,), progress_of_bias), "running_var": torch.zeros(2)}
    expected = layout.join(of_bias)
    assert kept == expected.tolist(), "parameters keep what is not along their mean"


def test_the_first_step_of_a_group_refuses_a_changed_buffer(tmp_path: Path) -> None:
    model = WithBuffers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = diloco.GroupSettings(num_replicas=1, warmup_steps=0)
    with (
        pytest.raises(ValueError, match="buffers: expected no change"),
        diloco.join(
            str(tmp_path), model=model, inner_optimizer=optimizer, replica=0, settings=settings
        ) as group,
    ):
        group.step(tokens=1, loss=step(model))


@pytest.mark.parametrize(
    "settings",
    [{}, {"merge": "rda"}, {"num_fragments": 2, "sync_every": 4}, {"outer_lr": 0.1}],
    ids=["plain", "rda", "fragments", "slow"],
)
def test_averaged_buffers_are_the_mean_of_the_replicas(
    tiny_group: Callable[..., TinyGroup], settings: dict[str, Any]
) -> None:
    """The running mean follows no momentum and no outer learning rate."""
    rounds = 2 * settings.get("num_fragments", 1)
    group = tiny_group(num_replicas=2, total_rounds=rounds, checkpoint_every=1, **settings)
    sent: dict[tuple[int, int], dict[str, Tensor]] = {}

    def on_step(member: Any, joined: Any) -> None:
        sent[member.replica, joined.round] = {
            name: buffer.clone() for name, buffer in member.model.named_buffers()
        }

    def loss(model: nn.Module, replica: int, number: int) -> Tensor:
        return step(model, 1000 * replica + number)

    members = [
        group.start(r, make_model=WithBuffers, loss=loss, on_step=on_step, buffers="average")
        for r in range(2)
    ]
    group.wait()
    for member in members:
        assert member.error is None, repr(member.error)
    for name in ("norm.running_mean", "norm.running_var"):
        ends = [dict(member.model.named_buffers())[name] for member in members]
        assert torch.equal(*ends)
        last = rounds - 1 if settings.get("num_fragments") else rounds
        candidates = [(sent[0, round][name] + sent[1, round][name]) / 2 for round in (last, rounds)]
        assert any(torch.allclose(ends[0], mean, rtol=1e-5) for mean in candidates)
    manifest = newest_manifest(group.store)
    assert manifest is not None
    assert [t.name for t in manifest.tensors][-3:] == [
        "constant",
        "norm.running_mean",
        "norm.running_var",
    ]
    group.assert_agreed(*members)


def test_replicas_with_another_choice_have_another_model() -> None:
    assert Layout(WithBuffers()).model_hash != Layout(WithBuffers(), buffers=True).model_hash
    assert issubclass(ModelMismatch, diloco.ReplicaError)
