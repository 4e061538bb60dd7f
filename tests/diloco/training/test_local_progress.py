"""What becomes of the local weights and of the residual when a round is applied: bit for bit the
plain formulas, whatever is computed in whose place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.inflight_rounds import OpenRound
from diloco.exchange.reduce import Merged
from diloco.model.flat_parameters import Layout
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings
from diloco.training.checkpoint import Restored
from diloco.training.local_progress import Ledger

ME = Identity(replica=0, incarnation="00001-00000000")
OTHER = Identity(replica=1, incarnation="00001-00000000")
NUMEL = 40
ALPHA = 0.3


def vector(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def commit(round: int, who: Identity) -> Commit:
    return Commit(
        round=round, fragment=0, committer=who, contributors=(who,), void="",
        tokens_total=round, committed_total=round, wall_s=0.0,
    )  # fmt: skip


class Books:
    """A ledger in the middle of an overlapped round: ``opened`` is on its way, and steps were made
    since."""

    def __init__(self, **changes: Any) -> None:
        settings = GroupSettings(
            sync_every=4, overlap_steps=2, mixing_alpha=ALPHA, topk=3, error_feedback=1.0,
            warmup_steps=0, **changes,
        )  # fmt: skip
        self.layout = Layout(nn.Linear(8, 5, bias=False))
        self.ledger = Ledger(ME, settings, self.layout, SystemClock())
        self.base = vector(0)
        restored = Restored(round=0, weights=self.base.clone(), base_rounds=(0,), totals=Totals())
        self.ledger.state.load(restored, None)
        self.ledger.work.begin_round()

    def step(self, weights: Tensor) -> None:
        self.layout.write(weights)
        self.ledger.work.count(tokens=1, loss=0.0)

    def open(self) -> OpenRound:
        opened = self.ledger.open(self.ledger.state.round, 0)
        assert opened is not None
        opened.sent = object()  # type: ignore[assignment]
        return opened

    def local(self) -> Tensor:
        return self.layout.read()

    def weights(self) -> Tensor:
        assert self.ledger.state.weights is not None
        return self.ledger.state.weights


@pytest.mark.parametrize("codec", ["fp32", "topk"])
@pytest.mark.parametrize("lives", [True, False], ids=["lives", "thrown-away"])
def test_a_contributor_keeps_a_share_of_what_came_after_its_snapshot(
    codec: str, lives: bool
) -> None:
    books = Books(codec=codec)
    for round in (1, 2):
        books.step(vector(10 * round))
        before = books.weights().clone()
        residual = books.ledger.residuals.of[0]
        residual = None if residual is None else residual.clone()
        opened = books.open()
        gradient = (vector(10 * round) - before).neg_()
        contributed = gradient if residual is None else residual.mul(1.0).add_(gradient)
        assert torch.equal(opened.contributed, contributed)
        opened.lives = lives
        after = vector(10 * round + 1)
        books.step(after)
        outcome = books.ledger.apply(
            commit(round, ME), Merged(vector=vector(99)), opened, policy="rebase"
        )
        assert outcome == "included"
        kept = after - before
        if lives:
            kept.add_(gradient)
        expected = kept.mul_(ALPHA).add_(books.weights())
        assert torch.equal(books.local(), expected)
        left = books.ledger.residuals.of[0]
        if codec == "fp32":
            assert left is None
        else:
            how = get_codec("topk", topk=3)
            expected = contributed - how.decode(how.encode(contributed), NUMEL)
            assert left is not None and torch.equal(left, expected)


@pytest.mark.parametrize("codec", ["fp32", "topk"])
@pytest.mark.parametrize("contributed", [True, False])
def test_who_was_missed_keeps_all_of_its_drift(codec: str, contributed: bool) -> None:
    books = Books(codec=codec)
    books.step(vector(1))
    opened = books.open() if contributed else None
    books.step(vector(2))
    outcome = books.ledger.apply(
        commit(1, OTHER), Merged(vector=vector(99)), opened, policy="rebase"
    )
    assert outcome == "late"
    expected = (vector(2) - books.base).add_(books.weights())
    assert torch.equal(books.local(), expected)
    assert books.ledger.residuals.of == [None], "what was not taken is in the local weights still"
