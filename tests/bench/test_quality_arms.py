"""Arms of the comparison: equal tokens, and members of a round that do not depend on time."""

from __future__ import annotations

import pytest

from bench.experiments.arms import CORE, TOKENS, VARIANTS, Arm, all_arms, dropped, tuning
from diloco.protocol.settings import GroupSettings

ARMS = [*(arm for arm in all_arms() if not arm.retired), *tuning()]
HALF = Arm(name="half", title="", drop=0.5)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_is_a_valid_group_of_equal_tokens(arm: Arm) -> None:
    settings = GroupSettings(**arm.group_settings(seed=1))
    assert settings.total_steps == arm.total_steps
    assert arm.tokens == TOKENS or arm.name == "single_quarter"
    assert settings.total_rounds % settings.eval_every == 0, "the last round is evaluated"


def test_core_arms_come_first_and_names_are_unique() -> None:
    assert all_arms()[: len(CORE)] == CORE
    names = [arm.name for arm in all_arms()]
    assert len(set(names)) == len(names)


def test_variants_inherit_the_learning_rates() -> None:
    rates = ("inner_lr", "outer_lr", "outer_momentum")
    tuned = next(arm for arm in CORE if arm.name == "diloco").group_settings(0)
    for arm in VARIANTS:
        if arm.name == "topk_plain":  # it varies the outer optimizer
            continue
        settings = arm.group_settings(0)
        assert [settings[rate] for rate in rates] == [tuned[rate] for rate in rates]


def test_quorum_is_all_replicas_unless_contributions_are_lost_or_members_change() -> None:
    quorum = {arm.name: arm.group_settings(0)["min_quorum"] for arm in all_arms()}
    assert quorum["diloco"] == 4
    assert (
        quorum["late_30_keep_0.5"]
        == quorum["late_outage_keep_0.5"]
        == quorum["ramp_up"]
        == quorum["ramp_down"]
        == 1
    )


def test_dropped_contributions_are_seeded_and_at_least_one_remains() -> None:
    draws = [dropped(HALF, round=r, seed=0) for r in range(1, 41)]
    assert draws == [dropped(HALF, round=r, seed=0) for r in range(1, 41)]
    assert max(map(len, draws)) == 3
    # Four coins a round, without the draw that drops all: (4 * 1/2 - 4/16) / (15/16) = 1.87 of 4.
    assert sum(map(len, draws)) / 40 == pytest.approx(28 / 15, abs=0.5)


def test_an_outage_and_losses_by_speed() -> None:
    outage = Arm(name="outage", title="", outage=(3, 13, 20))
    lost = [dropped(outage, round=r, seed=0) for r in range(1, 41)]
    assert lost == [frozenset({3} if 13 <= r <= 20 else ()) for r in range(1, 41)]
    by_speed = Arm(name="speed", title="", drops=(0.0, 0.0, 0.0, 1.0))
    assert dropped(by_speed, round=1, seed=0) == frozenset({3})


def test_results_of_arms_without_new_fields_stay_valid() -> None:
    definition = HALF.definition(0)
    assert not {"drops", "outage", "retired", "fragments", "late_keep"} & definition.keys()
