"""Local weights and residuals after a commit equal the plain formulas bit for bit, although the
implementation reuses memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.inflight_rounds import InflightRound
from diloco.exchange.reduce import Merged
from diloco.model.flat_parameters import Layout
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings
from diloco.training.checkpoint import Restored
from diloco.training.late_share import ALL, Kept
from diloco.training.local_progress import LocalProgress
from diloco.training.replica_state import EarlyContribution

ME = Identity(replica=0, incarnation="00001-00000000")
EARLIER = Identity(replica=0, incarnation="00000-00000000")
OTHER = Identity(replica=1, incarnation="00001-00000000")
NUMEL = 40
ALPHA = 0.3


def vector(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def commit(round: int, who: Identity) -> Commit:
    return Commit(
        round=round,
        fragment=0,
        committer=who,
        contributors=(who,),
        void="",
        tokens_total=round,
        committed_total=round,
        wall_s=0.0,
    )


class ProgressHarness:
    """Local progress in the middle of an overlapped round."""

    def __init__(self, **changes: Any) -> None:
        settings = GroupSettings(
            sync_every=4,
            overlap_steps=2,
            mixing_alpha=ALPHA,
            topk=3,
            error_feedback=1.0,
            warmup_steps=0,
            **changes,
        )
        self.layout = Layout(nn.Linear(8, 5, bias=False))
        self.progress = LocalProgress(ME, settings, self.layout, SystemClock())
        self.base = vector(0)
        restored = Restored(round=0, weights=self.base.clone(), base_rounds=(0,), totals=Totals())
        self.progress.state.load(restored, None)
        self.progress.counter.begin_round()

    def step(self, weights: Tensor) -> None:
        self.layout.write(weights)
        self.progress.counter.count(tokens=1, loss=0.0)

    def open(self) -> InflightRound:
        opened = self.progress.open(self.progress.state.round, 0)
        assert opened is not None
        opened.sent = object()  # type: ignore[assignment]
        return opened

    def local(self) -> Tensor:
        return self.layout.read()

    def weights(self) -> Tensor:
        assert self.progress.state.weights is not None
        return self.progress.state.weights


@pytest.mark.parametrize("codec", ["fp32", "topk"])
@pytest.mark.parametrize("discarded", [False, True], ids=["kept", "discarded"])
def test_a_contributor_keeps_alpha_of_its_later_progress(codec: str, discarded: bool) -> None:
    harness = ProgressHarness(codec=codec)
    for round in (1, 2):
        harness.step(vector(10 * round))
        before = harness.weights().clone()
        residual = harness.progress.residuals.of[0]
        residual = None if residual is None else residual.clone()
        opened = harness.open()
        gradient = (vector(10 * round) - before).neg_()
        contributed = gradient if residual is None else residual.mul(1.0).add_(gradient)
        assert torch.equal(opened.contributed, contributed)
        if discarded:
            harness.progress.mark_discarded()
        after = vector(10 * round + 1)
        harness.step(after)
        outcome = harness.progress.apply(
            commit(round, ME), Merged(vector=vector(99)), opened, keep=Kept(0.5)
        )
        assert outcome == "included"
        kept = after - before
        if not discarded:
            kept.add_(gradient)
        expected = kept.mul_(ALPHA).add_(harness.weights())
        assert torch.equal(harness.local(), expected)
        left = harness.progress.residuals.of[0]
        if codec == "fp32":
            assert left is None
        else:
            how = get_codec("topk", topk=3)
            expected = contributed - how.decode(how.encode(contributed), NUMEL)
            assert left is not None and torch.equal(left, expected)


@pytest.mark.parametrize("codec", ["fp32", "topk"])
@pytest.mark.parametrize("contributed", [True, False])
@pytest.mark.parametrize("keep", [Kept(0.25), ALL], ids=["share", "all"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_late_replica_keeps_its_work_without_the_component_along_the_mean(
    codec: str, contributed: bool, keep: Kept, rounds: int
) -> None:
    """Steps after the contributed snapshot were not missed, so they are kept whole."""
    harness = ProgressHarness(codec=codec)
    before = harness.weights().clone()
    mean = vector(99)
    harness.step(vector(1) + before - 0.5 * mean)  # descends along the mean
    missed = harness.local() - before
    opened = None
    for _ in range(rounds):
        opened = harness.open()
    if contributed:
        harness.step(harness.local() + vector(2))
    own = opened if contributed else None
    outcome = harness.progress.apply(commit(1, OTHER), Merged(vector=mean), own, keep=keep)
    assert outcome == "late"
    kept = missed.clone()
    if keep is not ALL:
        along = float(missed @ mean / (mean @ mean))
        assert along < -0.1
        kept = (kept - along * mean) * (0.25 if rounds > 1 else 1.0)
    since = vector(2) if contributed else torch.zeros(NUMEL)
    torch.testing.assert_close(harness.local(), harness.weights() + kept + since)
    assert harness.progress.residuals.of == [None], "the local weights still have it"


@pytest.mark.parametrize("mean", [-vector(1), torch.zeros(NUMEL)], ids=["opposite", "zero"])
def test_work_in_no_direction_of_the_mean_is_kept_whole(mean: Tensor) -> None:
    harness = ProgressHarness()
    before = harness.weights().clone()
    harness.step(before - vector(1))
    harness.progress.apply(commit(1, OTHER), Merged(vector=mean), None, keep=Kept(0.5))
    torch.testing.assert_close(harness.local(), harness.weights() - vector(1))


def test_all_work_is_kept_beside_an_early_contribution() -> None:
    """The round includes the contribution of an earlier process of this replica."""
    harness = ProgressHarness()
    before = harness.weights().clone()
    harness.progress.early[1] = EarlyContribution(incarnation=EARLIER.incarnation, residual=None)
    harness.step(before - vector(99))
    harness.open()
    harness.open()
    harness.progress.apply(commit(1, EARLIER), Merged(vector=vector(99)), None, keep=Kept(0.5))
    torch.testing.assert_close(harness.local(), harness.weights() - vector(99))
