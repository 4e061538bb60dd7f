"""Findings are a pure function of the rows of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runs.queries import findings
from runs.queries.findings import (
    AlertFacts,
    PoolFacts,
    ReplicaFacts,
    RoundFacts,
    RunFacts,
    find,
)

RUN = RunFacts(
    state="running",
    live=4,
    quorum=2,
    target=4,
    cost_usd=1.0,
    budget_usd=10.0,
    committed=20,
    silent_s=5.0,
    checkpoint_every=10,
    checkpoint_round=20,
    round_s=60.0,
)


def messages(run: RunFacts = RUN, **parts: Any) -> list[str]:
    return [one.message for one in find(run, **parts)]


def test_a_healthy_run_has_none() -> None:
    pools = [PoolFacts(id=1, name="Modal H100", state="healthy", replicas=4)]
    replicas = [ReplicaFacts(number=n, state="computing") for n in range(4)]
    rounds = [RoundFacts(straggler=n % 4, lag_s=20.0) for n in range(20)]
    assert messages(pools=pools, replicas=replicas, rounds=rounds) == []


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("action_required", "Modal H100: blocked, action required"),
        ("open", "Modal H100: launches paused after failures"),
        ("half_open", "Modal H100: launching one replica to test"),
        ("price_limit", "Modal H100: price above the limit"),
        ("failing", "Modal H100: launches fail and are retried"),
    ],
)
def test_a_pool_that_launches_nothing(state: str, text: str) -> None:
    pool = PoolFacts(id=7, name="Modal H100", state=state, last_error="quota exceeded: 2 x H100")
    [one] = find(RUN, pools=[pool])
    assert (one.message, one.detail, one.pool, one.tab) == (text, pool.last_error, 7, "replicas")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cost_usd": 8.2}, "budget 82% spent"),
        ({"cost_usd": 10.0}, "budget 100% spent"),
        ({"live": 1}, "below quorum: 1 of 2 needed replicas live"),
        ({"silent_s": 2280.0}, "no data for 38 min"),
        ({"committed": 40}, "checkpoint overdue: 20 rounds without one, expected every 10"),
        (
            {"checkpoint_round": None},
            "checkpoint overdue: 20 rounds without one, expected every 10",
        ),
    ],
)
def test_figures_of_the_run(change: dict[str, Any], text: str) -> None:
    run = replace(RUN, **change)
    assert messages(run) == [text]
    ended = messages(replace(run, state="succeeded"))
    assert ended == ([text] if "budget" in text else [])


@pytest.mark.parametrize(
    "change",
    [
        {"budget_usd": None},
        {"cost_usd": None},
        {"silent_s": None},
        {"checkpoint_every": 0, "committed": 999},
        {"live": 0, "committed": 0, "checkpoint_round": 0},
    ],
)
def test_unknown_figures_are_no_finding(change: dict[str, Any]) -> None:
    assert messages(replace(RUN, **change)) == []


def test_the_slowest_replica() -> None:
    rounds = [RoundFacts(straggler=9, lag_s=31.0)] * 10 + [RoundFacts(straggler=2, lag_s=1.0)]
    [one] = find(RUN, rounds=rounds)
    assert one.message == "replica 9 was last in 10 of 11 rounds"
    assert (one.replica, one.tab) == (9, "timeline")
    assert messages(rounds=rounds[:7]) == []
    assert messages(rounds=[replace(one, lag_s=2.0) for one in rounds]) == []
    assert messages(rounds=[RoundFacts(straggler=None, lag_s=None)] * 20) == []


def test_replicas_in_trouble_share_a_finding() -> None:
    replicas = [ReplicaFacts(number=n, state="lost", reason="preempted") for n in range(9)]
    replicas += [ReplicaFacts(number=9, state="failed", reason="CUDA error")]
    failed, lost = find(RUN, replicas=replicas)
    assert (failed.message, failed.detail, failed.replica) == ("replica 9 failed", "CUDA error", 9)
    assert lost.message == "replicas 0, 1, 2, 3, 4, 5 and 3 more lost, waiting for a relaunch"
    assert (failed.level, lost.level) == ("error", "warning")


def test_open_alerts_are_findings_unless_they_are_computed_here() -> None:
    alerts = [
        AlertFacts(kind="budget", level="warning", title="Budget", message="90 %"),
        AlertFacts(kind="nan", level="error", title="Loss is NaN", message="replica 3", replica=3),
    ]
    [one] = find(RUN, alerts=alerts)
    assert (one.message, one.detail, one.replica) == ("Loss is NaN", "replica 3", 3)


def test_errors_come_first() -> None:
    run = replace(RUN, cost_usd=8.5, live=1)
    rounds = [RoundFacts(straggler=1, lag_s=30.0)] * 10
    levels = [one.level for one in find(run, rounds=rounds)]
    assert levels == sorted(levels, key=findings.LEVELS.index)
