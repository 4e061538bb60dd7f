"""A few seeds of the model check; ``bench/model_check.py`` runs many."""

from __future__ import annotations

from tests.diloco.model.check import run_seed
from tests.matrix import matrix


@matrix("seed", [*range(6), 322], fast=2)
def test_the_invariants_hold_under_faults(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.failure == "", f"python bench/model_check.py --first {seed} --seeds 1 --verbose"


def test_a_seed_is_deterministic() -> None:
    first, second = run_seed(4), run_seed(4)
    assert (first.counts, first.rounds, first.virtual_s) == (
        second.counts,
        second.rounds,
        second.virtual_s,
    )
