"""The decision core, told as short scenarios: what was seen when, and what follows."""

from __future__ import annotations

import dataclasses

import pytest

from diloco.rendezvous.records import ContributionRecord, Identity, Plan
from diloco.rendezvous.rounds import (
    Action,
    MakeCommit,
    MakePlan,
    Memory,
    Merge,
    Reduce,
    RoundView,
    Totals,
    Wait,
    decide,
    screen,
)
from diloco.rendezvous.settings import GroupSettings

SETTINGS = GroupSettings(num_replicas=3, min_quorum=2, grace_s=60.0, total_rounds=10)


def contribution(replica: int, **changes: object) -> ContributionRecord:
    record = ContributionRecord(
        round=5, fragment=0, base_round=4, base_digest="base", replica=replica,
        incarnation="00001-00000000", model_hash="model", codec="fp32", numel=10, tokens=100,
        steps=10, loss=2.0, norm=1.0, size_bytes=40, digest=f"digest{replica}", compute_s=1.0,
        encode_s=0.0, wall_s=0.0,
    )  # fmt: skip
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def view(
    me: int, *records: ContributionRecord, expected: str = "012", **changes: object
) -> RoundView:
    seen = RoundView(
        round=5, fragment=0, me=Identity(replica=me, incarnation="00001-00000000"),
        settings=SETTINGS, model_hash="model", numel=10, base_round=4, base_digest="base",
        totals=Totals(committed=4, tokens=4000),
        contributions={record.replica: record for record in records},
        expected=frozenset(map(int, expected)),
    )  # fmt: skip
    return dataclasses.replace(seen, **changes)  # type: ignore[arg-type]


class Watch:
    """An observer: what it decides at each time, remembering as it goes."""

    def __init__(self) -> None:
        self.memory = Memory()

    def at(self, now_s: float, seen: RoundView) -> Action:
        action, self.memory = decide(seen, self.memory, now_s=now_s, wall_s=0.0, stagger_s=1.0)
        return action


def planned(seen: RoundView) -> Plan:
    action = Watch().at(0, seen)
    assert isinstance(action, MakePlan), action
    return action.plan


def test_everybody_is_there_so_the_first_plans_at_once() -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2)))
    assert [c.replica for c in plan.contributions] == [0, 1, 2]
    assert [c.weight for c in plan.contributions] == [1 / 3] * 3


def test_below_quorum_the_round_waits_and_says_for_whom() -> None:
    action = Watch().at(1000, view(0, contribution(0)))
    assert action == Wait(float("inf"), "quorum 1/2, waiting for replicas 1, 2")


def test_a_live_straggler_is_waited_for_until_the_grace_is_over() -> None:
    watch = Watch()
    seen = view(0, contribution(0), contribution(1))
    assert watch.at(100, seen) == Wait(160, "waiting for replica 2")
    assert isinstance(watch.at(159, seen), Wait)
    assert isinstance(watch.at(160, seen), MakePlan)


def test_a_dead_straggler_is_not_waited_for() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    assert [c.replica for c in plan.contributions] == [0, 1]


def test_a_dead_writers_durable_contribution_counts() -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2), expected="01"))
    assert [c.replica for c in plan.contributions] == [0, 1, 2]


def test_the_others_take_their_turn_when_the_planner_does_nothing() -> None:
    watch = Watch()
    seen = view(2, contribution(0), contribution(1), contribution(2))
    assert watch.at(10, seen) == Wait(12, "another replica's turn to plan")
    assert isinstance(watch.at(12, seen), MakePlan)


def test_a_straggler_that_arrives_restarts_nobodys_turn_from_zero_quorum() -> None:
    watch = Watch()
    watch.at(0, view(0, contribution(0), contribution(1)))
    action = watch.at(30, view(0, contribution(0), contribution(1), contribution(2)))
    assert isinstance(action, MakePlan)


def test_with_a_plan_the_payloads_are_reduced_first() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    assert Watch().at(0, view(1, plan=plan)) == Reduce(plan)


def test_the_commit_follows_the_merge_in_turns() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    done = view(0, plan=plan, merge=Merge(digest="mean"))
    first = Watch().at(0, done)
    assert isinstance(first, MakeCommit)
    assert first.commit.merged_digest == "mean"
    assert first.commit.tokens_total == 4200
    assert first.commit.committed_total == 5
    assert first.commit.loss == pytest.approx(2.0)
    assert not first.commit.last
    watch = Watch()
    second = view(1, plan=plan, merge=Merge(digest="mean"))
    assert watch.at(0, second) == Wait(1, "another replica's turn to commit")
    assert isinstance(watch.at(1, second), MakeCommit)


def test_a_payload_that_cannot_be_read_makes_the_round_void() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    action = Watch().at(0, view(0, plan=plan, merge=Merge(failure="crc", failed_replica=1)))
    assert isinstance(action, MakeCommit)
    commit = action.commit
    assert (commit.void, commit.void_replica, commit.merged_digest) == ("crc", 1, "")
    assert (commit.tokens_total, commit.committed_total, commit.last) == (4000, 4, False)


@pytest.mark.parametrize(
    ("settings", "last"),
    [({"total_rounds": 5}, True), ({"total_rounds": 6}, False), ({"max_tokens": 4200}, True),
     ({"max_tokens": 4201}, False)],
)  # fmt: skip
def test_the_last_commit_is_the_one_that_reaches_a_limit(
    settings: dict[str, int], last: bool
) -> None:
    limits = dataclasses.replace(SETTINGS, **settings)
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    seen = view(0, plan=plan, merge=Merge(digest="mean"), settings=limits)
    action = Watch().at(0, seen)
    assert isinstance(action, MakeCommit)
    assert action.commit.last is last


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_hash": "other"}, "expected model model, found other"),
        ({"base_round": 3}, "expected base round 4, found 3"),
        ({"base_digest": "drift"}, "expected digest of the base weights base, found drift"),
        ({"codec": "bf16"}, "expected codec fp32, found bf16"),
        ({"numel": 11}, "expected number of elements 10, found 11"),
        ({"round": 4}, "expected round 5, found 4"),
        ({"norm": float("nan")}, "expected a finite pseudo-gradient, found norm nan"),
        ({"loss": float("inf")}, "found norm 1.0 and loss inf"),
    ],
)
def test_a_foreign_contribution_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2, **changes)))
    assert [c.replica for c in plan.contributions] == [0, 1]
    assert [r.replica for r in plan.refused] == [2]
    assert words in plan.refused[0].reason


def test_the_majoritys_base_is_right_even_against_the_planner() -> None:
    drifted = view(
        0, contribution(0, base_digest="mine"), contribution(1), contribution(2), base_digest="mine"
    )
    accepted, refused = screen(drifted)
    assert [c.replica for c in accepted] == [1, 2]
    assert [r.replica for r in refused] == [0]


def test_a_contribution_without_tokens_counts_for_nothing() -> None:
    seen = view(0, contribution(0), contribution(1, tokens=0), expected="01")
    assert isinstance(Watch().at(0, seen), Wait)


def test_token_weights_follow_tokens_squared_over_steps() -> None:
    settings = dataclasses.replace(SETTINGS, weighting="tokens")
    plan = planned(
        view(0, contribution(0), contribution(1, tokens=200), expected="01", settings=settings)
    )
    assert [c.weight for c in plan.contributions] == [pytest.approx(0.2), pytest.approx(0.8)]
