"""The global state: what rebasing does to the local weights, and that void rounds do nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco.exchange.reduce import Merged
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer, digest
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.training.checkpoint import Restored
from diloco.training.global_state import GlobalState, is_finite


def commit(round: int, void: str = "") -> Commit:
    me = Identity(replica=0, incarnation="00001-00000000")
    return Commit(
        round=round, fragment=0, committer=me, contributors=(me,), merged_digest="", void=void,
        tokens_total=10 * round, committed_total=round, wall_s=0.0,
    )  # fmt: skip


@pytest.fixture
def state() -> GlobalState:
    layout = Layout(nn.Linear(2, 2, bias=False))
    state = GlobalState(layout, OuterOptimizer(lr=1.0, momentum=0.0, numel=4))
    state.load(Restored(round=0, weights=torch.zeros(4), base_rounds=(0,), totals=Totals()), None)
    return state


def merged() -> Merged:
    return Merged(vector=torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_loading_puts_the_global_weights_into_the_model(state: GlobalState) -> None:
    assert state.layout.read().tolist() == [0, 0, 0, 0]
    assert (state.round, state.bases[0].round) == (1, 0)


def test_an_included_replica_takes_the_global_weights(state: GlobalState) -> None:
    state.layout.write(torch.full((4,), 10.0))
    state.apply(commit(1), merged(), kept=None)
    assert state.layout.read().tolist() == [-1, -2, -3, -4]
    assert state.bases[0].digest == digest(torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    assert state.totals == Totals(committed=1, tokens=10)


def test_a_late_replica_keeps_its_progress_on_the_new_base(state: GlobalState) -> None:
    state.layout.write(torch.full((4,), 10.0))
    before = state.drift(0)
    state.apply(commit(1), merged(), kept=state.drift(0))
    assert state.layout.read().tolist() == [9, 8, 7, 6]
    assert torch.equal(state.drift(0), before)


def test_a_void_round_changes_nothing_but_the_count(state: GlobalState) -> None:
    state.layout.write(torch.full((4,), 10.0))
    base = state.bases[0]
    state.apply(commit(1, void="lost"), None, kept=None)
    assert state.layout.read().tolist() == [10] * 4
    assert (state.bases[0], state.round) == (base, 2)


def test_commits_are_applied_in_order(state: GlobalState) -> None:
    with pytest.raises(AssertionError, match="in order"):
        state.apply(commit(2), merged(), kept=None)


def test_finite_is_finite() -> None:
    assert is_finite(torch.zeros(0)) and is_finite(torch.ones(3))
    assert not is_finite(torch.tensor([1.0, float("nan")]))
    assert not is_finite(torch.tensor([float("-inf")]))
