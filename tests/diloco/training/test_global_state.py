"""The global state: rebasing of the local weights, and void rounds."""

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
        round=round,
        fragment=0,
        committer=me,
        contributors=(me,),
        merged_digest="",
        void=void,
        tokens_total=10 * round,
        committed_total=round,
        wall_s=0.0,
    )


@pytest.fixture
def state() -> GlobalState:
    layout = Layout(nn.Linear(2, 2, bias=False))
    state = GlobalState(layout, OuterOptimizer(lr=1.0, momentum=0.0, numel=4))
    state.load(Restored(round=0, weights=torch.zeros(4), base_rounds=(0,), totals=Totals()), None)
    return state


def merged() -> Merged:
    return Merged(vector=torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_loading_a_checkpoint_sets_the_model(state: GlobalState) -> None:
    assert state.layout.read().tolist() == [0, 0, 0, 0]
    assert (state.round, state.bases[0].round) == (1, 0)


def test_an_included_replica_gets_the_global_weights(state: GlobalState) -> None:
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


def test_is_finite_detects_nan_and_infinity() -> None:
    assert is_finite(torch.zeros(0)) and is_finite(torch.ones(3))
    assert not is_finite(torch.tensor([1.0, float("nan")]))
    assert not is_finite(torch.tensor([float("-inf")]))


def test_nothing_changes_before_it_is_announced(state: GlobalState) -> None:
    seen: list[list[float]] = []
    state.before_change = lambda: seen.append(state.weights.tolist())  # type: ignore[union-attr]
    state.apply(commit(1, void="a payload cannot be read"), None, kept=None)
    assert not seen
    state.apply(commit(2), merged(), kept=None)
    state.apply(commit(3), merged(), kept=None)
    assert seen == [[0, 0, 0, 0], [-1, -2, -3, -4]]


def test_a_snapshot_survives_a_load(state: GlobalState) -> None:
    """A checkpoint that is being written keeps its values while a newer one is loaded."""
    state.outer.vectors = {"momentum": torch.ones(4)}
    weights, outer = state.snapshot()
    state.outer.vectors.update(momentum=torch.full((4,), 7.0))
    restored = Restored(round=3, weights=torch.ones(4), base_rounds=(3,), totals=Totals())
    state.load(restored, None)
    assert outer.vectors["momentum"].tolist() == [1, 1, 1, 1]
    assert weights.tolist() == [0, 0, 0, 0]


def test_the_local_weights_are_restored_after_an_error(state: GlobalState) -> None:
    state.layout.write(torch.full((4,), 10.0))
    with pytest.raises(ZeroDivisionError), state.shown():
        assert state.layout.read().tolist() == [0, 0, 0, 0]
        raise ZeroDivisionError
    assert state.layout.read().tolist() == [10, 10, 10, 10]
