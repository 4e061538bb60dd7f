"""Processes that are paused or have a slow connection, in virtual time: what they conclude from the
leases of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.protocol import keys
from diloco.protocol.settings import GroupSettings
from diloco.store.multipart import Data
from tests.diloco.model.faulty_bucket import FaultyView
from tests.diloco.model.test_scenarios import make_harness, on_put, run
from tests.diloco.model.virtual_time import Process, Scheduler
from tests.matrix import matrix

PAUSE_S = 2 * GroupSettings().heartbeat_timeout_s
ROUNDS = 6


@matrix("plan", ["gather", "sharded", "syncer"], fast=["gather", "syncer"])
def test_a_pause_of_all_processes_makes_no_replica_late(plan: str) -> None:
    """A host that is suspended pauses all its processes at once. The first one to continue finds
    leases that have not changed for longer than the timeout, although all replicas are alive."""
    for seed in range(1, 9):
        harness = make_harness(
            reduce_plan=plan, seed=seed, min_quorum=1, grace_s=2 * PAUSE_S, total_rounds=ROUNDS
        )
        harness.scenario = replace(harness.scenario, syncer=plan == "syncer")

        def pause(scheduler: Scheduler = harness.scheduler) -> None:
            for _ in range(3):
                scheduler.sleep(6.3)
                scheduler.now_s += PAUSE_S

        harness.scheduler.spawn("pause", pause, Process("pause"))
        run(harness)
        found = [len(harness.plan(round)["contributions"]) for round in range(1, ROUNDS + 1)]
        assert found == [3] * ROUNDS, f"seed {seed}"


@pytest.mark.parametrize("plan", ["gather", "sharded"])
def test_slow_heartbeats_do_not_keep_a_dead_replica_alive(
    monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """Each heartbeat takes so long that it is a gap of its process."""
    grace_s = 100.0
    harness = make_harness(
        reduce_plan=plan,
        min_quorum=2,
        total_rounds=10,
        grace_s=grace_s,
        step_s=dict.fromkeys(range(3), 1.0),
    )
    harness._look_after = lambda: None  # type: ignore[method-assign]
    put = FaultyView.put

    def slow(view: FaultyView, key: str, data: Data) -> None:
        if keys.parse_beat(key):
            harness.scheduler.sleep(5.0)
        put(view, key, data)

    monkeypatch.setattr(FaultyView, "put", slow)
    written_s: dict[str, float] = {}

    def watch(key: str) -> None:
        written_s[key] = harness.scheduler.now_s
        if key == keys.commit(4):
            harness.scheduler.kill(harness.lives[2].process)

    with on_put(harness.bucket, watch):
        run(harness)
    first_s, *later_s = [
        written_s[keys.plan(n)] - written_s[keys.plan(n - 1)] for n in range(5, 11)
    ]
    assert first_s < grace_s / 2
    assert max(later_s) < 10.0, "no later round waits for it"
    assert harness.plan(10)["late"] == []
