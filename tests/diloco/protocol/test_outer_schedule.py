"""The outer learning rate by round."""

from __future__ import annotations

import math
from typing import Any

import pytest

from diloco.protocol.outer_schedule import outer_lr_at
from diloco.protocol.settings import GroupSettings, SettingsError


def rates(**settings: Any) -> list[float]:
    chosen = GroupSettings(**{"total_rounds": 5, "warmup_steps": 0, "outer_lr": 0.7, **settings})
    return [outer_lr_at(chosen, round) for round in range(1, 8)]


def test_by_default_the_rate_is_the_setting_itself() -> None:
    assert rates() == [0.7] * 7


def test_the_rate_falls_linearly_to_its_minimum_in_the_last_round() -> None:
    assert rates(outer_schedule="linear", outer_min_lr_ratio=0.2) == pytest.approx(
        [0.7, 0.56, 0.42, 0.28, 0.14, 0.14, 0.14]
    )


def test_the_rate_falls_by_a_cosine() -> None:
    expected = [0.35 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert rates(outer_schedule="cosine") == pytest.approx([*expected, 0.0, 0.0], abs=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_comes_before_the_schedule(schedule: str) -> None:
    found = rates(outer_schedule=schedule, outer_warmup_rounds=4)
    assert found[:4] == pytest.approx([0.175, 0.35, 0.525, 0.7])
    assert found[4] == pytest.approx(0.7 if schedule == "constant" else 0.0)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_one_round_uses_the_peak(schedule: str) -> None:
    assert rates(outer_schedule=schedule, total_rounds=1)[0] == 0.7


def test_the_bits_of_the_cosine_are_fixed() -> None:
    """Constants: another machine that computes other bits would leave its group."""
    found = rates(outer_schedule="cosine", total_rounds=8, outer_min_lr_ratio=0.1)
    assert [rate.hex() for rate in found] == BITS


BITS = [
    "0x1.6666666666666p-1",
    "0x1.566da26200f09p-1",
    "0x1.29ad2adc31e1cp-1",
    "0x1.d2042facb3cddp-2",
    "0x1.4276b19afa46ap-2",
    "0x1.8241171e94a1dp-3",
    "0x1.9e7e720eb0cd2p-4",
]


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(SettingsError, match="outer_warmup_rounds: expected at most the 5 rounds"):
        rates(outer_warmup_rounds=6)
