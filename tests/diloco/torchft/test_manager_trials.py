"""Short trials of the Manager's rounds with kills, pauses, hangs and stale lists."""

from __future__ import annotations

import pytest

from bench.support.manager_trials import VIOLATIONS, Trial, run_trial
from diloco.torchft import quorum_client


@pytest.mark.parametrize("seed", range(4))
def test_faults_neither_lose_nor_double_a_step(seed: int) -> None:
    trial = Trial(
        seed=seed,
        replicas=3,
        ranks=1 + seed % 2,
        min_replicas=1,
        stale=0.1 * (seed % 2),
        faults_s=150.0,
        quiet_s=60.0,
        kill=0.004,
    )
    oracle = run_trial(trial)
    assert oracle.violations == []
    assert oracle.counts["commits"] > 5


def test_without_faults_a_group_starts_and_goes_on() -> None:
    oracle = run_trial(Trial(seed=1, kill=0, pause=0, hang=0, stale=0, faults_s=60.0, quiet_s=40.0))
    assert oracle.violations == []
    assert oracle.counts["quorum timeouts"] == oracle.counts["abandoned rounds"] == 0


def test_the_oracle_finds_what_the_rules_prevent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the line and the guard, as the rounds were before, steps are lost."""
    decide = quorum_client.decide_quorum

    def without(joins, *, line=None, holders=(), majority_guard=False, **given):  # type: ignore[no-untyped-def]
        return decide(joins, **given)

    monkeypatch.setattr(quorum_client, "decide_quorum", without)
    oracle = run_trial(Trial(seed=3, faults_s=200.0, quiet_s=40.0, hang=0.01))
    assert any(oracle.counts[kind] for kind in VIOLATIONS)
