"""The decision core in short scenarios: records and times in, actions out."""

from __future__ import annotations

import dataclasses

import pytest

from diloco.protocol.round_planning import grace_window_s, screen
from diloco.protocol.round_view import (
    MakeCommit,
    MakePlan,
    Merge,
    Reduce,
    Wait,
)
from tests.diloco.protocol.decision_harness import SETTINGS, Watch, contribution, planned, view


def test_the_first_replica_plans_at_once_when_all_have_contributed() -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2)))
    assert [c.replica for c in plan.contributions] == [0, 1, 2]
    assert [c.weight for c in plan.contributions] == [1 / 3] * 3


def test_below_quorum_the_round_waits_and_names_the_missing() -> None:
    action = Watch().at(1000, view(0, contribution(0)))
    assert action == Wait(float("inf"), "quorum 1/2, waiting for replicas 1, 2", patient=True)


def test_a_live_straggler_is_waited_for_until_the_grace_window_ends() -> None:
    watch = Watch()
    seen = view(0, contribution(0), contribution(1))
    assert watch.at(100, seen) == Wait(160, "waiting for replica 2")
    assert isinstance(watch.at(159, seen), Wait)
    assert isinstance(watch.at(160, seen), MakePlan)


def test_a_dead_straggler_is_not_waited_for() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    assert [c.replica for c in plan.contributions] == [0, 1]


def test_a_suspected_straggler_is_not_waited_for_and_keeps_its_share() -> None:
    plan = planned(view(0, contribution(0), contribution(1), suspected=frozenset({2})))
    assert [c.weight for c in plan.contributions] == [1 / 3] * 2
    assert [late.replica for late in plan.late] == [2]


def test_a_dead_writers_durable_contribution_counts() -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2), expected="01"))
    assert [c.replica for c in plan.contributions] == [0, 1, 2]


def test_the_next_candidate_plans_when_the_first_does_not() -> None:
    watch = Watch()
    seen = view(2, contribution(0), contribution(1), contribution(2))
    assert watch.at(10, seen) == Wait(12, "waiting for another replica to plan")
    assert isinstance(watch.at(12, seen), MakePlan)


def test_an_arriving_straggler_does_not_reset_the_quorum_time() -> None:
    watch = Watch()
    watch.at(0, view(0, contribution(0), contribution(1)))
    action = watch.at(30, view(0, contribution(0), contribution(1), contribution(2)))
    assert isinstance(action, MakePlan)


def test_a_planned_round_is_reduced_before_the_commit() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    assert Watch().at(0, view(1, plan=plan)) == Reduce(plan, 0)


def test_candidates_commit_in_turn_after_the_merge() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    done = view(0, plan=plan, merges={0: Merge(digest="mean")})
    first = Watch().at(0, done)
    assert isinstance(first, MakeCommit)
    assert first.commit.merged_digest == "mean"
    assert first.commit.tokens_total == 4200
    assert first.commit.committed_total == 5
    assert first.commit.loss == pytest.approx(2.0)
    assert not first.commit.last
    watch = Watch()
    second = view(1, plan=plan, merges={0: Merge(digest="mean")})
    assert watch.at(0, second) == Wait(1, "waiting for another replica to commit")
    assert isinstance(watch.at(1, second), MakeCommit)


def test_an_unreadable_payload_voids_the_round() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    action = Watch().at(0, view(0, plan=plan, merges={0: Merge(failure="crc", failed_replica=1)}))
    assert isinstance(action, MakeCommit)
    commit = action.commit
    assert (commit.void, commit.void_replica, commit.merged_digest) == ("crc", 1, "")
    assert (commit.tokens_total, commit.committed_total, commit.last) == (4000, 4, False)


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"total_rounds": 5}, True),
        ({"total_rounds": 6}, False),
        ({"max_tokens": 4200}, True),
        ({"max_tokens": 4201}, False),
    ],
)
def test_the_commit_that_reaches_a_limit_is_the_last(settings: dict[str, int], last: bool) -> None:
    limits = dataclasses.replace(SETTINGS, **settings)
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    seen = view(0, plan=plan, merges={0: Merge(digest="mean")}, settings=limits)
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
def test_the_refusal_of_a_foreign_contribution_names_the_mismatch(
    changes: dict[str, object], words: str
) -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2, **changes)))
    assert [c.replica for c in plan.contributions] == [0, 1]
    assert [r.replica for r in plan.refused] == [2]
    assert words in plan.refused[0].reason


def test_the_base_digest_of_the_majority_overrules_the_planner() -> None:
    drifted = view(
        0, contribution(0, base_digest="mine"), contribution(1), contribution(2), base_digest="mine"
    )
    accepted, refused = screen(drifted)
    assert [c.replica for c in accepted] == [1, 2]
    assert [r.replica for r in refused] == [0]


def test_a_contribution_without_tokens_is_ignored() -> None:
    seen = view(0, contribution(0), contribution(1, tokens=0), expected="01")
    assert isinstance(Watch().at(0, seen), Wait)


# -- overlap: the previous commit, the grace window ----------------------------------------------


def test_a_commit_waits_for_the_previous_commit() -> None:
    plan = planned(view(0, contribution(0), contribution(1), expected="01"))
    seen = view(0, plan=plan, merges={0: Merge(digest="mean")}, totals=None)
    assert Watch().at(9, seen) == Wait(float("inf"), "waiting for the commit of round 4")


def test_the_adaptive_window_is_the_time_left_by_overlap() -> None:
    settings = dataclasses.replace(
        SETTINGS,
        sync_every=100,
        overlap_steps=90,
        grace_gamma=0.5,
        grace_floor_s=2.0,
        grace_s=8.0,
        warmup_steps=0,
    )
    accepted = [contribution(0), contribution(1)]  # 0.1 s a step: 9 s of overlap

    def window_s(waited_s: float, sync_s: float) -> float:
        seen = view(0, settings=settings, waited_s=waited_s, sync_s=sync_s)
        return grace_window_s(seen, accepted)

    assert window_s(1.0, 2.0) == pytest.approx(3.0)
    assert window_s(5.0, 9.0) == 2.0  # the floor
    settings = dataclasses.replace(settings, grace_gamma=10.0)
    assert window_s(1.0, 2.0) == 8.0  # the cap


# -- guards --------------------------------------------------------------------------------------


def test_an_outlier_is_refused_only_with_enough_contributions() -> None:
    settings = dataclasses.replace(SETTINGS, outlier_z=4.0)
    records = [contribution(n, norm=1.0 + n / 100) for n in range(3)]
    wild = contribution(3, norm=9.0)
    four = view(0, *records, wild, expected="0123", settings=settings)
    accepted, refused = screen(four)
    assert [c.replica for c in accepted] == [0, 1, 2]
    assert "robust deviations above the median" in refused[0].reason
    accepted, refused = screen(view(0, *records[:2], wild, expected="013", settings=settings))
    assert (len(accepted), refused) == (3, [])
    accepted, refused = screen(view(0, *records, wild, expected="0123"))
    assert (len(accepted), refused) == (4, [])  # off by default


def test_a_fresh_replica_is_quarantined_unless_all_are_fresh() -> None:
    settings = dataclasses.replace(SETTINGS, quarantine_rounds=2, min_quorum=1)
    fresh = contribution(2, rounds_here=1)
    accepted, refused = screen(view(0, contribution(0), fresh, settings=settings))
    assert [c.replica for c in accepted] == [0]
    assert (refused[0].kind, refused[0].reason) == ("quarantine", "round 2 of 2 after joining")
    accepted, refused = screen(view(2, fresh, expected="2", settings=settings))
    assert [c.replica for c in accepted] == [2], "all others are dead: it continues alone"
    assert screen(view(2, fresh, expected="02", settings=settings))[0] == []


def test_a_fixed_world_size_makes_the_rest_spares() -> None:
    settings = dataclasses.replace(
        SETTINGS, world_size_mode="fixed_with_spares", num_replicas=2, min_quorum=2
    )
    plan = planned(view(0, *map(contribution, range(3)), settings=settings))
    assert [c.replica for c in plan.contributions] == [0, 1]
    assert [(r.replica, r.kind) for r in plan.refused] == [(2, "spare")]


# -- a store without a conditional write ---------------------------------------------------------


def test_only_the_coordinator_creates() -> None:
    records = [contribution(0), contribution(1)]
    other = view(0, *records, expected="01", committer=1)
    assert Watch().at(99, other) == Wait(float("inf"), "waiting for replica 1 to plan")
    plan = planned(view(1, *records, expected="01", committer=1))
    done = view(0, plan=plan, merges={0: Merge(digest="mean")}, committer=1)
    assert Watch().at(99, done) == Wait(float("inf"), "waiting for replica 1 to commit")
    action = Watch().at(0, dataclasses.replace(done, me=dataclasses.replace(done.me, replica=1)))
    assert isinstance(action, MakeCommit)


def test_a_replica_that_voided_two_rounds_is_excluded_from_the_next() -> None:
    seen = view(0, contribution(0), contribution(1), contribution(2), excluded_replica=2)
    plan = planned(seen)
    assert [c.replica for c in plan.contributions] == [0, 1]
    assert "voided the last two rounds" in plan.refused[0].reason


def test_waiting_below_quorum_is_patient() -> None:
    below = Watch().at(0, view(0, contribution(0)))
    assert isinstance(below, Wait) and below.patient
    straggling = Watch().at(0, view(0, contribution(0), contribution(1)))
    assert isinstance(straggling, Wait) and not straggling.patient
