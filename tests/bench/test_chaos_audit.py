"""The audit of a run's log reports every kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.experiments.audit import Log, audit, read_log
from bench.experiments.processes import life_s
from diloco.protocol import keys
from diloco.protocol.records import (
    Commit,
    ContributionRecord,
    Identity,
    Plan,
)
from diloco.protocol.telemetry import RoundReport, Segment, StepColumns
from diloco.store.base import LocalStore
from tests.diloco.exchange.planned import planned

ROUNDS, STEPS, TOKENS = 3, 5, 50
IDENTITIES = [Identity(replica=r, incarnation=f"00001-{r:08x}") for r in range(2)]


def record(round: int, identity: Identity) -> ContributionRecord:
    return ContributionRecord(
        round=round,
        fragment=0,
        base_round=round - 1,
        base_digest=f"w{round - 1}",
        replica=identity.replica,
        incarnation=identity.incarnation,
        model_hash="m",
        codec="fp32",
        numel=1,
        tokens=TOKENS,
        new_tokens=TOKENS,
        steps=STEPS,
        rounds=1,
        loss=1.0,
        norm=1.0,
        size_bytes=4,
        digest="d",
        compute_s=1.0,
        encode_s=0.0,
        wall_s=float(round),
    )


def plan(round: int) -> Plan:
    contributions = tuple(
        planned(identity, tokens=TOKENS, new_tokens=TOKENS, steps=STEPS) for identity in IDENTITIES
    )
    return Plan(
        round=round,
        fragment=0,
        mode="gather",
        planner=IDENTITIES[0],
        contributions=contributions,
        wall_s=0.0,
    )


def commit(round: int) -> Commit:
    return Commit(
        round=round,
        fragment=0,
        committer=IDENTITIES[0],
        contributors=tuple(IDENTITIES),
        merged_digest="g",
        void="",
        tokens_total=2 * TOKENS * round,
        committed_total=round,
        wall_s=float(round),
    )


def segment(identity: Identity) -> Segment:
    reports = tuple(
        RoundReport(
            round=round,
            outcome="included",
            started_wall_s=0.0,
            committed_wall_s=0.0,
            phases={},
            bytes_up=0,
            bytes_down=0,
            requests=0,
            norm=1.0,
            update_norm=1.0,
            contributors=2,
            weights_digest=f"w{round}",
        )
        for round in range(1, ROUNDS + 1)
    )
    steps = tuple(range(ROUNDS * STEPS))
    return Segment(
        replica=identity.replica,
        incarnation=identity.incarnation,
        n=1,
        wall_s=0.0,
        state="done",
        round=1,
        steps=StepColumns(step=steps),
        rounds=reports,
        last=True,
    )


def key(identity: Identity) -> tuple[int, str]:
    return identity.replica, identity.incarnation


@pytest.fixture
def good() -> Log:
    rounds = range(1, ROUNDS + 1)
    return Log(
        commits=tuple(commit(round) for round in rounds),
        plans={round: plan(round) for round in rounds},
        records={
            round: {key(identity): record(round, identity) for identity in IDENTITIES}
            for round in rounds
        },
        segments={key(identity): (segment(identity),) for identity in IDENTITIES},
        round_steps=STEPS,
    )


def with_commit(log: Log, round: int, **changes: Any) -> Log:
    commits = list(log.commits)
    commits[round - 1] = replace(commits[round - 1], **changes)
    return replace(log, commits=tuple(commits))


def with_record(log: Log, round: int, **changes: Any) -> Log:
    changed = replace(log.records[round][key(IDENTITIES[1])], **changes)
    return replace(
        log, records=log.records | {round: log.records[round] | {key(IDENTITIES[1]): changed}}
    )


def skipped(log: Log) -> Log:
    return replace(log, commits=(log.commits[0], log.commits[2]))


def counted_twice(log: Log) -> Log:
    return with_commit(log, 3, committed_total=2)


def tokens_lost(log: Log) -> Log:
    return with_commit(log, 2, tokens_total=199)


def no_plan(log: Log) -> Log:
    return replace(log, plans={1: log.plans[1], 2: log.plans[2]})


def another_contributor(log: Log) -> Log:
    return with_commit(log, 2, contributors=(IDENTITIES[0],))


def two_incarnations_of_one_replica(log: Log) -> Log:
    both = (IDENTITIES[0], IDENTITIES[1], Identity(replica=1, incarnation="00002-0000000a"))
    return with_commit(log, 2, contributors=both)


def stale_base(log: Log) -> Log:
    return with_record(log, 3, base_round=1)


def other_base_weights(log: Log) -> Log:
    return with_record(log, 3, base_digest="x")


def record_missing(log: Log) -> Log:
    return replace(log, records={**log.records, 2: {}})


def weights_differ(log: Log) -> Log:
    (segment,) = log.segments[key(IDENTITIES[1])]
    reports = (*segment.rounds[:2], replace(segment.rounds[2], weights_digest="x"))
    other = replace(segment, rounds=reports)
    return replace(log, segments=log.segments | {key(IDENTITIES[1]): (other,)})


def more_steps_than_trained(log: Log) -> Log:
    contributions = tuple(replace(c, steps=STEPS + 1) for c in log.plans[3].contributions)
    return replace(log, plans=log.plans | {3: replace(log.plans[3], contributions=contributions)})


def steps_counted_twice(log: Log) -> Log:
    """A killed incarnation; its telemetry has no total number of steps."""
    (segment,) = log.segments[key(IDENTITIES[1])]
    killed = replace(
        log, segments={**log.segments, key(IDENTITIES[1]): (replace(segment, last=False),)}
    )
    contributions = tuple(replace(c, steps=2 * STEPS) for c in log.plans[3].contributions[1:])
    plan = replace(log.plans[3], contributions=(log.plans[3].contributions[0], *contributions))
    return replace(killed, plans=log.plans | {3: plan})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (skipped, "expected a commit of round 2, found round 3"),
        (counted_twice, "expected totals of 3 rounds"),
        (tokens_lost, "found 2 and 199"),
        (no_plan, "round 3: expected a plan"),
        (another_contributor, "round 2: the commit names other contributors"),
        (two_incarnations_of_one_replica, "round 2: replica 1 is named 2 times"),
        (stale_base, "round 3: expected base round 2 of fragment 0"),
        (other_base_weights, "round 3: expected one base, found 2"),
        (record_missing, "round 2: expected a record of replica 0"),
        (weights_differ, "round 3: global weights differ"),
        (steps_counted_twice, "round 3: expected at most the steps of 1 rounds from replica 1"),
        (more_steps_than_trained, "expected at most the 15 steps it made in fragment 0, found 16"),
    ],
)
def test_damage_is_reported(good: Log, damage: Callable[[Log], Log], message: str) -> None:
    assert message in "\n".join(audit(damage(good)))


def test_intact_log_has_no_problems(good: Log) -> None:
    assert audit(good) == []


def test_void_round_keeps_the_base(good: Log) -> None:
    log = with_commit(good, 2, void="damaged", committed_total=1, tokens_total=2 * TOKENS)
    log = with_commit(log, 3, committed_total=2, tokens_total=4 * TOKENS)
    assert "round 3: expected base round 1" in "\n".join(audit(log))
    for identity in IDENTITIES:
        log.records[3][key(identity)] = replace(log.records[3][key(identity)], base_round=1)
    assert audit(log) == []


def test_each_fragment_has_its_base(good: Log) -> None:
    log = replace(good, fragments=3)
    assert "round 2: expected base round 0 of fragment 1" in "\n".join(audit(log))
    for round in (2, 3):
        for identity in IDENTITIES:
            log.records[round][key(identity)] = replace(
                log.records[round][key(identity)], base_round=0, fragment=round - 1
            )
    assert audit(log) == []


def test_log_is_read_from_the_bucket(good: Log, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for commit in good.commits:
        store.create(keys.commit(commit.round), commit.to_bytes())
    for round, plan in good.plans.items():
        store.create(keys.plan(round), plan.to_bytes())
    for round, records in good.records.items():
        for (replica, incarnation), record in records.items():
            where = (round, replica, incarnation)
            store.put(keys.contribution_payload(*where), b"\0")
            store.put(keys.contribution_record(*where), record.to_bytes())
    for (replica, incarnation), (segment,) in good.segments.items():
        store.put(keys.telemetry(replica, incarnation, 1), segment.to_bytes())
    assert read_log(store, round_steps=STEPS) == good


def test_schedule_of_kills_is_seeded() -> None:
    lives = [life_s(3, replica, life, mtbf_s=60.0) for replica in range(20) for life in range(20)]
    assert lives[0] == life_s(3, 0, 0, mtbf_s=60.0)
    assert lives[0] != life_s(4, 0, 0, mtbf_s=60.0)
    assert sum(lives) / len(lives) == pytest.approx(60.0, rel=0.2)
