"""The cosine of each replica's contribution to the round's mean, compared with the stored
payloads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.cosine import PIECE, cosine_to_mean
from diloco.exchange.payload import PayloadInfo, blocks_of
from diloco.exchange.reduce import Own, Reduction
from diloco.exchange.timings import Timings
from diloco.model.flat_parameters import Layout
from diloco.protocol import blocks, keys
from diloco.protocol.blocks import HEADER_BYTES, Span
from diloco.protocol.payload_size import CODEC_SHAPES
from diloco.protocol.records import Identity
from diloco.protocol.telemetry import RoundReport, Segment
from tests.matrix import matrix

MakeGroup = Callable[..., Any]
ME = Identity(replica=0, incarnation="00001-00000000")
CODECS = tuple(CODEC_SHAPES)


def cosine(x: Tensor, y: Tensor) -> float:
    a, b = x.double().numpy(), y.double().numpy()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def whole(vector: Tensor) -> Callable[[Span], Tensor]:
    return lambda where: vector[where.start : where.stop]


# -- the sum itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", [1, 300, 3 * PIECE + 17, 2**19 + 5])
def test_the_cosine_uses_the_decoded_payload(codec: str, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    own, noise = torch.randn(2, numel, generator=generator)
    mean = 0.5 * own + noise
    before = own.clone(), mean.clone()
    coder = get_codec(codec, topk=64)
    given = Own(identity=ME, digest="", vector=own)
    result = cosine_to_mean(lambda where: given.decoded(where, coder), mean)
    decoded = coder.decode(coder.encode(own), numel)
    assert result == pytest.approx(cosine(decoded, mean), abs=1e-12)
    assert torch.equal(own, before[0]) and torch.equal(mean, before[1])


@pytest.mark.parametrize("scale", [1e-37, 1e37])
def test_extreme_norms_do_not_change_the_cosine(scale: float) -> None:
    own, mean = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    result = cosine_to_mean(whole(own * scale), mean * scale)
    assert result == pytest.approx(24 / 25)


def test_the_cosine_never_exceeds_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        own = torch.randn(7, generator=generator)
        assert cosine_to_mean(whole(own), 3 * own) == pytest.approx(1.0)
        assert abs(cosine_to_mean(whole(own), -own / 3) or 0) <= 1.0


@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf])
def test_a_zero_or_non_finite_vector_has_no_cosine(odd: float) -> None:
    one, other = torch.ones(5), torch.full((5,), odd)
    assert cosine_to_mean(whole(one), other) is None
    assert cosine_to_mean(whole(other), one) is None


# -- whole groups ----------------------------------------------------------------------------------


class Odd(nn.Module):
    """12,010 parameters in four tensors, an embedding among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.hidden = nn.Linear(4, 1000)
        self.out = nn.Linear(1000, 2)
        self.table = nn.Embedding(501, 10)

    def forward(self, x: Tensor) -> Tensor:
        looked_up = self.table(torch.arange(x.shape[0])).mean()
        return self.out(self.hidden(x)) * 0.01 + looked_up


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that the model has several to share."""
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 4096)


def train(group: Any, *, syncer: bool = False, replicas: int = 3, **start: Any) -> list[Any]:
    if syncer:
        group.start_syncer()
        while not group.store.list(keys.member(group.settings.max_replicas)):
            pass
    members = [group.start(n, make_model=Odd, **start) for n in range(replicas)]
    group.wait()
    return members


def reports_of(group: Any, replica: int) -> dict[int, RoundReport]:
    result = group.store.list(f"telemetry/{replica:05d}/")
    segments = [Segment.from_bytes(group.store.get(info.key)) for info in result]
    return {report.round: report for segment in segments for report in segment.rounds}


def expected(group: Any, commit: Any) -> dict[int, float]:
    """Return the cosines by replica, computed from the stored payloads."""
    layout = Layout(
        Odd(), fragments=group.settings.num_fragments, pattern=group.settings.fragment_pattern
    )
    slots, plan = layout.table.slots_of(commit.fragment), group.plan(commit.round)
    timings = Timings(SystemClock())
    reduction = Reduction(group.store, group.settings, plan, slots, timings=timings)
    mean = reduction.committed(commit).vector
    codec = get_codec(group.settings.codec, topk=group.settings.topk)
    result = {}
    for c in plan.contributions:
        key = keys.contribution_payload(commit.round, c.replica, c.incarnation)
        info = PayloadInfo(
            round=commit.round,
            fragment=commit.fragment,
            replica=c.replica,
            incarnation=c.incarnation,
            codec=codec.name,
            numel=mean.numel(),
            attempt=c.attempt,
        )
        body = group.store.get(key)[HEADER_BYTES:]
        result[c.replica] = cosine(blocks_of(info, codec).decode(body, Span(0, mean.numel())), mean)
    return result


def assert_reported(group: Any, replicas: int) -> None:
    commits = group.commits()
    reports = [reports_of(group, number) for number in range(replicas)]
    for commit in commits:
        by_replica = expected(group, commit)
        assert sorted(by_replica) == list(range(replicas))
        for number, value in by_replica.items():
            assert reports[number][commit.round].cosine == pytest.approx(value, abs=1e-6)
            assert -1 < value < 1


@matrix("plan", ["gather", "sharded", "syncer"], fast=("sharded",))
@matrix(
    ("codec", "merge"),
    [*((codec, "mean") for codec in CODECS), ("int8", "rda"), ("fp32", "rda")],
    fast=[("int8", "mean"), ("fp32", "rda")],
)
def test_every_replica_reports_its_cosine_with_every_plan_and_codec(
    tiny_group: MakeGroup, plan: str, codec: str, merge: str
) -> None:
    group = tiny_group(
        reduce_plan=plan, codec=codec, merge=merge, total_rounds=2, checkpoint_every=100
    )
    members = train(group, syncer=plan == "syncer")
    group.assert_agreed(*members)
    assert group.plan(1).mode == plan
    assert_reported(group, 3)


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_the_cosine_is_reported_per_fragment(tiny_group: MakeGroup, overlap: int) -> None:
    group = tiny_group(
        num_fragments=2, overlap_steps=overlap, sync_every=4, codec="bf16", checkpoint_every=100
    )
    train(group)
    assert_reported(group, 3)


def test_a_void_round_reports_no_cosine(tiny_group: MakeGroup) -> None:
    group = tiny_group(reduce_plan="sharded")
    train(group, spoil=("rounds/00000002/contributions/00000.*.bin", "corrupt"))
    assert group.commits()[1].void
    for number in range(3):
        reports = reports_of(group, number)
        assert reports[2].cosine is None
        assert reports[1].cosine is not None and reports[3].cosine is not None


def test_a_missed_round_reports_no_cosine(tiny_group: MakeGroup) -> None:
    group = tiny_group(num_replicas=2, grace_s=0.0, total_rounds=5)
    first_commit = threading.Event()

    def watch(member: Any, joined: Any) -> None:
        if member.replica == 0 and joined.round == 2:
            first_commit.set()
        if (
            member.replica == 1 and member.steps == 3
        ):  # after round 1's steps, before the contribution
            assert first_commit.wait(600)

    train(group, replicas=2, on_step=watch)
    late = reports_of(group, 1)[1]
    assert late.outcome == "late" and late.cosine is None
    assert reports_of(group, 0)[1].cosine == pytest.approx(1.0), "it was alone in the mean"
