"""The weights of a round: all live replicas divide them, so late work enters once, now or later."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diloco.protocol.records import ContributionRecord, LateReplica, Plan
from diloco.protocol.round_decision import make_commit
from diloco.protocol.round_view import Merge, Totals
from diloco.protocol.round_weights import HUNG_AFTER, STEADY_ROUNDS
from tests.diloco.protocol.decision_harness import SETTINGS, Watch, contribution, planned, view

TOKENS = dataclasses.replace(SETTINGS, weighting="tokens")
AFTER_GRACE_S = SETTINGS.grace_s + 1


def plan_without_the_late(*records: ContributionRecord, **changes: Any) -> Plan:
    """Return the plan that replica 0 makes once the grace window is over."""
    seen = view(0, *records, **changes)
    watch = Watch()
    watch.at(0, seen)
    action: Any = watch.at(AFTER_GRACE_S, seen)
    return action.plan  # type: ignore[no-any-return]


def weights(plan: Plan) -> list[float]:
    return [c.weight for c in plan.contributions]


def test_with_all_replicas_present_the_weights_are_those_of_a_mean() -> None:
    plan = planned(view(0, contribution(0), contribution(1), contribution(2)))
    assert weights(plan) == [1 / 3] * 3 and plan.late == ()


def test_the_weights_leave_room_for_a_late_replica() -> None:
    plan = plan_without_the_late(contribution(0), contribution(1), expected="0123")
    assert weights(plan) == [1 / 4] * 2
    assert plan.late == (
        LateReplica(replica=2, units=1.0, missed=1),
        LateReplica(replica=3, units=1.0, missed=1),
    )


def test_several_rounds_of_work_have_the_weight_of_one_replica() -> None:
    late = contribution(1, rounds=3, tokens=300, steps=30)
    assert weights(planned(view(0, contribution(0), late, expected="01"))) == [0.5, 0.5]
    plan = planned(view(0, contribution(0), late, expected="01", settings=TOKENS))
    assert weights(plan) == [0.5, 0.5], "tokens per round of work, whatever it holds"


def test_token_weights_are_tokens_per_round_of_work() -> None:
    settings = TOKENS
    plan = planned(
        view(0, contribution(0), contribution(1, tokens=300), expected="01", settings=settings)
    )
    assert weights(plan) == [0.25, 0.75]


def test_a_late_replica_has_its_last_known_tokens() -> None:
    before = planned(
        view(
            0, contribution(0), contribution(2, tokens=600, rounds=2), settings=TOKENS, expected=""
        )
    )
    plan = plan_without_the_late(contribution(0), contribution(1), settings=TOKENS, previous=before)
    assert plan.late == (LateReplica(replica=2, units=300.0, missed=1),)
    assert weights(plan) == [0.2, 0.2]
    again = plan_without_the_late(contribution(0), contribution(1), settings=TOKENS, previous=plan)
    assert again.late == (LateReplica(replica=2, units=300.0, missed=2),)
    assert weights(again) == [100 / 350] * 2


def test_a_late_replica_that_never_contributed_counts_as_the_mean_of_the_others() -> None:
    plan = plan_without_the_late(contribution(0), contribution(1, tokens=300), settings=TOKENS)
    assert plan.late == (LateReplica(replica=2, units=200.0, missed=1),)
    assert weights(plan) == [100 / 600, 300 / 600]


@pytest.mark.parametrize("units", [float("nan"), float("inf"), -1.0, 0.0])
def test_impossible_units_of_the_previous_plan_are_not_used(units: float) -> None:
    before = plan_without_the_late(contribution(0), contribution(1), settings=TOKENS)
    before = dataclasses.replace(
        before, late=(LateReplica(replica=2, units=units, missed=1),), contributions=()
    )
    plan = plan_without_the_late(contribution(0), contribution(1), settings=TOKENS, previous=before)
    assert plan.late == (LateReplica(replica=2, units=100.0, missed=2),)


def test_the_room_of_a_late_replica_does_not_follow_an_impossible_previous_plan() -> None:
    before = plan_without_the_late(contribution(0), contribution(1))
    late = LateReplica(replica=2, units=1e15, missed=-5)
    before = dataclasses.replace(before, late=(late, late))
    plan = plan_without_the_late(contribution(0), contribution(1), previous=before)
    assert plan.late == (LateReplica(replica=2, units=1.0, missed=1),)
    assert weights(plan) == [1 / 3] * 2


def rooms(rounds: int, **changes: Any) -> tuple[list[float], Plan]:
    """Return the room, in replicas, that each of so many rounds without replica 2 leaves for it,
    and the last plan."""
    settings = dataclasses.replace(SETTINGS, **changes)
    plan, found = None, []
    for _ in range(rounds):
        plan = plan_without_the_late(
            contribution(0), contribution(1), previous=plan, settings=settings
        )
        found.append(2 / sum(weights(plan)) - 2)
    assert plan
    return found, plan


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("missed", [1, 2, 5, HUNG_AFTER])
def test_the_room_in_missed_rounds_is_the_most_work_that_a_late_replica_can_carry(
    keep: float, missed: int
) -> None:
    """In each round it keeps a share of what it has, with the work of the round."""
    carried = [0.0]
    for _ in range(missed):
        carried.append(keep * carried[-1] + 1)
    found, _ = rooms(missed, late_keep=keep)
    assert sum(found) == pytest.approx(carried[-1])


def test_the_room_shrinks_with_the_missed_rounds_of_the_fragment() -> None:
    found, _ = rooms(6, num_fragments=3, sync_every=99)
    assert found == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_a_replica_that_misses_eight_rounds_in_a_row_has_hung(keep: float) -> None:
    found, plan = rooms(HUNG_AFTER + 2, late_keep=keep)
    assert found == pytest.approx([keep**n for n in range(HUNG_AFTER)] + [0.0] * 2, abs=1e-12)
    back = planned(view(0, contribution(0), contribution(1), contribution(2), previous=plan))
    assert back.late == () and weights(back) == [1 / 3] * 3
    late = plan_without_the_late(contribution(0), contribution(1), previous=back)
    assert late.late[0].missed == 1


ALL = tuple(map(contribution, range(4)))


ALONE = dataclasses.replace(SETTINGS, min_quorum=1)


def next_plan(previous: Plan | None, *present: int, expected: str = "0123", **changes: Any) -> Plan:
    """Return the plan of the round after ``previous`` with these of four replicas, all live."""
    previous = previous and dataclasses.replace(previous, round=4)
    return plan_without_the_late(
        *(ALL[replica] for replica in present), expected=expected, previous=previous, **changes
    )


def after_steady(rounds: int, **changes: Any) -> Plan | None:
    """Return the last plan of so many rounds with all four replicas."""
    plan = None
    for _ in range(rounds):
        plan = next_plan(plan, 0, 1, 2, 3, **changes)
    return plan


def test_a_replica_that_becomes_late_in_a_steady_group_is_away_until_it_contributes() -> None:
    plan = after_steady(STEADY_ROUNDS)
    for missed in range(1, 4):
        plan = next_plan(plan, 0, 1, 2)
        assert plan.late == (LateReplica(replica=3, units=1.0, missed=missed, away=True),)
        assert weights(plan) == [1 / 3] * 3
    plan = next_plan(plan, 0, 1, 2, 3)
    assert weights(plan) == [1 / 4] * 4 and plan.steady_rounds == 3
    assert not next_plan(plan, 0, 1, 2).late[0].away, "the group has been steady for three rounds"


def test_a_group_in_which_late_work_returns_is_not_steady() -> None:
    plan = after_steady(STEADY_ROUNDS)
    assert plan is not None
    back = contribution(3, rounds=4)
    returned = plan_without_the_late(
        *ALL[:3], back, expected="0123", previous=dataclasses.replace(plan, round=4)
    )
    assert (plan.steady_rounds, returned.steady_rounds) == (STEADY_ROUNDS, 0)


@pytest.mark.parametrize(
    ("changes", "away"), [({"num_fragments": 2}, False), ({"outlier_z": 4.0}, False), ({}, True)]
)
def test_with_fragments_or_an_outlier_limit_no_replica_is_away(
    changes: dict[str, Any], away: bool
) -> None:
    settings = dataclasses.replace(SETTINGS, **changes)
    plan = next_plan(after_steady(STEADY_ROUNDS, settings=settings), 0, 1, 2, settings=settings)
    assert plan.late[0].away is away


def work(plan: Plan) -> float:
    """Return the rounds of work in a round, with their weights."""
    return sum(c.weight * c.rounds for c in plan.contributions)


def returning(*present: int, previous: Plan | None, rounds: int = 9, **changes: Any) -> Plan:
    records = [contribution(r, rounds=rounds if r == 3 else 1) for r in present]
    return plan_without_the_late(
        *records, previous=previous and dataclasses.replace(previous, round=4), **changes
    )


def test_a_round_holds_at_most_three_rounds_of_work_of_replicas_that_return() -> None:
    away = next_plan(after_steady(STEADY_ROUNDS), 0, 1, 2)
    assert weights(returning(0, 1, 2, 3, previous=away)) == [1 / 4] * 4, "the limit"
    for present in ((2, 3), (3,)):
        plan = returning(*present, previous=away, expected="3", settings=ALONE)
        assert work(plan) == pytest.approx(3)
    cut_off = next_plan(None, 0, 1, 2, expected="012")
    assert work(returning(2, 3, previous=cut_off, expected="23", settings=ALONE)) == pytest.approx(
        3
    )
    unknown = returning(2, 3, previous=None, expected="23", settings=ALONE)
    assert work(unknown) == pytest.approx(3)
    tokens = dataclasses.replace(ALONE, weighting="tokens")
    large = contribution(3, rounds=9, tokens=90_000)
    plan = plan_without_the_late(
        *ALL[:3],
        large,
        expected="0123",
        settings=tokens,
        previous=dataclasses.replace(away, round=4),
    )
    assert work(plan) == pytest.approx(3)


def test_with_all_progress_kept_a_round_holds_three_rounds_of_work_of_any_number() -> None:
    settings = dataclasses.replace(SETTINGS, late_keep=1.0)
    away = next_plan(after_steady(STEADY_ROUNDS, settings=settings), 0, 1, 2, settings=settings)
    plan = returning(0, 1, 2, 3, previous=away, rounds=90, expected="0123", settings=settings)
    assert work(plan) == pytest.approx(3)


def test_rounds_that_were_kept_in_part_are_not_limited() -> None:
    late = next_plan(None, 0, 1, 2)
    assert not late.late[0].away
    assert weights(returning(2, 3, previous=late, expected="23", settings=ALONE)) == [1 / 2] * 2


@pytest.mark.parametrize("rounds", [0, 1, STEADY_ROUNDS - 1])
def test_the_weights_leave_room_in_a_group_that_is_not_steady(rounds: int) -> None:
    plan = next_plan(after_steady(rounds), 0, 1, 2)
    assert not plan.late[0].away and weights(plan) == [1 / 4] * 3
    for _ in range(STEADY_ROUNDS):  # it was not away, and is not later
        plan = next_plan(plan, 0, 1, 2)
        assert not plan.late[0].away
    assert plan.steady_rounds == STEADY_ROUNDS


def test_no_replica_is_away_while_more_than_a_quarter_is_late() -> None:
    plan = next_plan(after_steady(STEADY_ROUNDS), 0, 1)
    assert [late.away for late in plan.late] == [False] * 2 and weights(plan) == [1 / 4] * 2
    away = next_plan(after_steady(STEADY_ROUNDS), 0, 1, 2)
    plan = next_plan(away, 0, 1)
    assert [late.away for late in plan.late] == [False] * 2
    assert weights(plan) == pytest.approx([1 / 3.5] * 2), "one has missed a round, the other two"
    assert plan.steady_rounds == 0


def test_after_a_round_whose_plan_is_unknown_no_group_is_steady() -> None:
    plan = after_steady(STEADY_ROUNDS)
    assert plan is not None
    two_before = dataclasses.replace(plan, round=3)
    records = ALL[:3]
    for previous in (None, two_before):
        plan = plan_without_the_late(*records, expected="0123", previous=previous)
        assert not plan.late[0].away and plan.steady_rounds == 0
    plan = plan_without_the_late(*ALL, expected="0123", previous=two_before)
    assert plan.steady_rounds == 1


def test_refused_replicas_and_replicas_in_quarantine_get_no_room() -> None:
    refused = contribution(2, loss=float("nan"))
    assert weights(planned(view(0, contribution(0), contribution(1), refused))) == [0.5, 0.5]
    fresh = contribution(2, rounds_here=0)
    settings = dataclasses.replace(SETTINGS, quarantine_rounds=2)
    plan = planned(view(0, contribution(0), contribution(1), fresh, settings=settings))
    assert weights(plan) == [0.5, 0.5] and plan.late == ()


def test_there_is_no_room_if_late_work_is_dropped_or_the_world_size_is_fixed() -> None:
    dropped = dataclasses.replace(SETTINGS, late_keep=0.0)
    fixed = dataclasses.replace(
        SETTINGS, world_size_mode="fixed_with_spares", num_replicas=2, min_quorum=2
    )
    for settings in (dropped, fixed):
        plan = plan_without_the_late(contribution(0), contribution(1), settings=settings)
        assert weights(plan) == [0.5, 0.5] and plan.late == ()


def test_the_writer_of_a_contribution_without_tokens_is_late() -> None:
    seen = view(0, contribution(0), contribution(1), contribution(2, tokens=0), expected="")
    plan = planned(seen)
    assert weights(plan) == [1 / 3] * 2 and plan.late[0].replica == 2


@pytest.mark.parametrize("rounds", [0, -1, 10**16])
def test_an_impossible_number_of_rounds_of_work_is_refused(rounds: int) -> None:
    seen = view(0, contribution(0), contribution(1), contribution(2, rounds=rounds))
    (refusal,) = planned(seen).refused
    assert refusal.replica == 2 and "expected rounds of work from 1 to" in refusal.reason


def test_the_loss_of_a_commit_is_a_mean_whatever_the_weights_sum_to() -> None:
    plan = plan_without_the_late(contribution(0, loss=1.0), contribution(1, loss=3.0))
    seen = view(0, plan=plan)
    commit = make_commit(seen, plan, Merge(digest="mean"), (), Totals(), 0.0)
    assert sum(weights(plan)) == pytest.approx(2 / 3)
    assert commit.loss == pytest.approx(2.0)
