"""What is compared: equal tokens, and no clock that decides who is in a round."""

from __future__ import annotations

import pytest

from bench.experiments.arms import CORE, TOKENS, VARIANTS, Arm, all_arms, dropped, tuning
from diloco.protocol.settings import GroupSettings

EVERY = [*all_arms(), *tuning()]


@pytest.mark.parametrize("arm", EVERY, ids=lambda arm: arm.name)
def test_every_arm_is_a_valid_group_of_equal_tokens(arm: Arm) -> None:
    settings = GroupSettings(**arm.group_settings(seed=1))
    assert settings.total_steps == arm.total_steps
    assert arm.tokens == TOKENS or arm.name == "single_quarter"
    assert settings.total_rounds % settings.eval_every == 0, "the last round is evaluated"


def test_core_arms_come_first_and_names_are_unique() -> None:
    assert all_arms()[: len(CORE)] == CORE
    assert len({arm.name for arm in EVERY}) == len(EVERY)


def test_variants_inherit_the_learning_rates() -> None:
    rates = ("inner_lr", "outer_lr", "outer_momentum")
    tuned = next(arm for arm in CORE if arm.name == "diloco").group_settings(0)
    for arm in VARIANTS:
        if arm.name in ("topk_plain", "dropped_50_half"):  # their point is another outer optimizer
            continue
        found = arm.group_settings(0)
        assert [found[rate] for rate in rates] == [tuned[rate] for rate in rates]


def test_quorum_is_everybody_unless_contributions_are_lost_or_members_change() -> None:
    quorum = {arm.name: arm.group_settings(0)["min_quorum"] for arm in all_arms()}
    assert quorum["diloco"] == 4
    assert quorum["dropped_30"] == quorum["ramp_up"] == quorum["ramp_down"] == 1


def test_dropped_contributions_are_seeded_and_never_all() -> None:
    draws = [dropped(0.5, replicas=4, round=r, seed=0) for r in range(1, 401)]
    assert draws == [dropped(0.5, replicas=4, round=r, seed=0) for r in range(1, 401)]
    assert max(map(len, draws)) == 3
    # Four coins a round, none of them all tails: (4 * 1/2 - 4/16) / (15/16) = 1.87 of 4.
    assert sum(map(len, draws)) / 400 == pytest.approx(28 / 15, abs=0.15)
    assert dropped(0.0, replicas=4, round=1, seed=0) == frozenset()
