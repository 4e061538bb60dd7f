"""Short trials of the Manager's rounds with kills, pauses, hangs and stale lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.support.manager_trials import LEASE_S, VIOLATIONS, Harness, Process, Trial, run_trial
from diloco.protocol import manager_keys
from diloco.protocol.manager_records import CommitDecision, Quorum, QuorumMember, Segment
from diloco.protocol.records import Identity
from diloco.torchft import quorum_client as session
from tests.matrix import matrix


@matrix("seed", range(4), fast=1)
def test_faults_neither_lose_nor_duplicate_a_step(seed: int) -> None:
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


def test_without_faults_a_group_starts_and_continues() -> None:
    oracle = run_trial(Trial(seed=1, kill=0, pause=0, hang=0, stale=0, faults_s=60.0, quiet_s=40.0))
    assert oracle.violations == []
    assert oracle.counts["quorum timeouts"] == oracle.counts["abandoned rounds"] == 0


def test_the_oracle_detects_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the line and the guard, steps are lost."""
    decide = session.decide_quorum

    def without(joins, *, line=None, holders=(), majority_guard=False, **given):  # type: ignore[no-untyped-def]
        return decide(joins, **given)

    monkeypatch.setattr(session, "decide_quorum", without)
    oracle = run_trial(Trial(seed=3, faults_s=200.0, quiet_s=40.0, hang=0.01))
    assert any(oracle.counts[kind] for kind in VIOLATIONS)


class Records:
    """A trial of replicas with one rank, whose records the test writes."""

    def __init__(self, *, majority_guard: bool = True) -> None:
        self.harness = Harness(Trial(seed=0, majority_guard=majority_guard))
        self.oracle = self.harness.oracle

    def process(self, replica: int) -> Process:
        process = Process(self.harness, replica, 0)
        identity = Identity(replica=replica, incarnation="00001-a")
        process.session = cast(Any, SimpleNamespace(me=identity))
        process.recovery = cast(Any, SimpleNamespace(branch=0, head=0))
        self.harness.processes.append(process)
        return process

    def at(self, now_s: float, *alive: Process) -> None:
        self.harness.scheduler.now_s = now_s
        for process in alive:
            self.oracle.written(process, "members/beat")

    def quorum(self, n: int, *members: Process, **line: Any) -> None:
        seats = tuple(
            QuorumMember(
                member=member.replica,
                incarnation="00001-a",
                replica_id=f"r{member.replica}",
                rank=0,
                step=0,
                heals=False,
            )
            for member in members
        )
        writer = Identity(replica=members[0].replica, incarnation="00001-a")
        record = Quorum(n=n, step=0, mode="", seats=seats, writer=writer, **line)
        members[0].store._write(manager_keys.quorum(n), record.to_bytes())

    def commit(self, n: int, *members: Process) -> None:
        included = tuple(member.replica for member in members)
        writer = Identity(replica=included[0], incarnation="00001-a")
        record = CommitDecision(n=n, c=0, included=included, writer=writer, committed=True)
        members[0].store._write(manager_keys.commit(n, 0), record.to_bytes())

    def learn(self, n: int, process: Process, *, branch: int = 0) -> None:
        process.recovery = cast(Any, SimpleNamespace(branch=branch, head=n))
        process.history, process.step = (*process.history, n), process.step + 1
        self.oracle.committed(process, n)


def test_a_round_is_not_lost_when_its_silent_holder_returns() -> None:
    """The quorum after the one that omitted the round continues only its line."""
    records = Records()
    holder, other = records.process(1), records.process(2)
    records.at(0.0, holder)
    records.quorum(1, holder, branch=0, head=0)
    records.commit(1, holder)  # and is paused before the call returns
    records.at(3 * LEASE_S, other)
    records.quorum(2, other, branch=2, head=0)
    records.at(3 * LEASE_S + 1, holder, other)
    records.learn(1, holder)
    records.quorum(3, other, holder, branch=2, head=0)
    assert records.oracle.violations == []
    assert records.oracle.abandoned == {1: 2}
    assert records.oracle.counts["abandoned rounds"] == 1


@pytest.mark.parametrize("learnt", [True, False])
def test_a_round_is_lost_while_a_process_of_its_commit_lives(learnt: bool) -> None:
    """Also while that process hangs between the creation of the commit record and its return."""
    records = Records()
    holder, other = records.process(1), records.process(2)
    records.at(0.0, holder)
    records.quorum(1, holder, branch=0, head=0)
    records.commit(1, holder)
    if learnt:
        records.learn(1, holder)
    records.at(3 * LEASE_S, holder, other)
    records.quorum(2, other, branch=2, head=0)
    assert [text.split(": ", 1)[1] for text in records.oracle.violations] == [
        "lost: quorum 2 leaves out round 1"
    ]


def test_an_older_state_of_the_line_and_a_failed_round_are_not_lost() -> None:
    """States of a process in no commit, and of one whose round was closed."""
    records = Records()
    holder, behind = records.process(1), records.process(2)
    records.at(0.0, holder, behind)
    records.quorum(1, holder, behind, branch=0, head=0)
    records.commit(1, holder, behind)
    for process in (holder, behind):
        records.learn(1, process)
    records.quorum(2, holder, branch=0, head=1)
    records.commit(2, holder)
    records.learn(2, holder)
    records.quorum(3, holder, branch=0, head=2)
    records.quorum(4, holder, behind, branch=0, head=2)
    assert records.oracle.violations == []
    assert records.oracle.abandoned == {}


@pytest.mark.parametrize("majority_guard", [True, False])
def test_a_commit_of_a_state_that_its_quorum_left_out_is_resurrected(majority_guard: bool) -> None:
    """The line holds without the guard as well."""
    records = Records(majority_guard=majority_guard)
    holder, other = records.process(1), records.process(2)
    records.at(0.0, holder)
    records.quorum(1, holder, branch=0, head=0)
    records.commit(1, holder)
    records.learn(1, holder)
    records.quorum(2, holder, branch=0, head=1)
    records.commit(2, holder)
    records.learn(2, holder)
    records.at(3 * LEASE_S, other)
    records.quorum(3, other, holder, branch=3, head=0, line=(Segment(branch=0, until=1),))
    assert records.oracle.abandoned == {2: 3}
    records.commit(3, other, holder)
    records.learn(3, holder, branch=3)
    assert [text.split(": ", 1)[1] for text in records.oracle.violations] == [
        "resurrected: round 3 continues rounds [2]"
    ]
