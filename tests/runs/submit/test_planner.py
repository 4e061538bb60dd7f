"""The planner's arithmetic, worked by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diloco.protocol.reduce_cost import round_cost
from diloco.protocol.setting_spec import SettingsError
from runs.submit.planner import LARGEST_H, Question, answer, plan, sweep


def question(**changes: Any) -> Question:
    return Question(
        **{
            "parameters": 10_000_000,
            "num_replicas": 4,
            "sync_every": 100,
            "step_s": 0.5,
            "tokens_per_step": 1000,
            "tokens": 40_000_000,
            "mbit_s": 800.0,
            "latency_s": 0.0,
            "usd_h": 3.6,
            "egress_usd_gb": 0.0,
            "reduce_plan": "gather",
        }
        | changes
    )


def test_bytes_and_seconds_of_a_round() -> None:
    found = answer(question())
    cost = round_cost(numel=10_000_000, codec="fp32", replicas=4, mode="gather")
    assert (found.up_bytes, found.down_bytes) == (cost.up, cost.down)
    assert found.round_bytes == 4 * (cost.up + cost.down)
    # 40 MB up and 120 MB down at 100 MB/s, one after the other.
    assert found.exchange_s == pytest.approx(1.6, rel=1e-4)
    assert found.exposed_s == found.exchange_s
    assert found.utilisation == pytest.approx(50 / 51.6, rel=1e-4)


def test_the_tokens_say_how_long_the_run_is() -> None:
    found = answer(question())
    assert found.rounds == 100  # of 100 steps of 1,000 tokens by four replicas
    assert found.wall_s == pytest.approx(100 * 51.6, rel=1e-4)
    assert found.hardware_usd == pytest.approx(4 * 3.6 * 100 * 51.6 / 3600, rel=1e-4)
    assert found.total_bytes == 100 * found.round_bytes
    assert answer(question(sync_every=200)).rounds == 50
    assert answer(question(sync_every=200)).total_bytes == pytest.approx(50 * found.round_bytes)


def test_overlap_hides_the_exchange() -> None:
    found = answer(question(overlap_steps=2))
    assert found.exposed_s == pytest.approx(0.6, rel=1e-3)
    assert answer(question(overlap_steps=4)).utilisation == 1.0


def test_fragments_make_rounds_shorter_and_smaller() -> None:
    whole, parts = answer(question()), answer(question(num_fragments=5))
    assert parts.rounds == 5 * (whole.rounds or 0)
    assert parts.up_bytes == pytest.approx(whole.up_bytes / 5, rel=1e-3)
    assert parts.total_bytes == pytest.approx(whole.total_bytes, rel=1e-3)


def test_what_failures_take_away_is_trained_again() -> None:
    healthy, failing = answer(question()), answer(question(mtbf_h=0.5, replace_s=60.0))
    assert healthy.goodput == 1.0
    assert failing.goodput < 0.95
    assert (failing.rounds or 0) > (healthy.rounds or 0)
    assert (failing.wall_s or 0) > (healthy.wall_s or 0)
    assert (failing.usd or 0) > (healthy.usd or 0)
    assert failing.efficiency == pytest.approx(failing.utilisation * failing.goodput)
    # The run is as much longer as it is less efficient, but for the end of the last round.
    assert (failing.wall_s or 0) == pytest.approx(
        40_000_000 / (4 * 2000 * failing.efficiency), rel=0.02
    )


def test_a_run_that_never_ends_has_no_wall_time() -> None:
    found = answer(question(mtbf_h=0.0001, replace_s=600.0, min_quorum=4))
    assert found.rounds is None
    assert found.wall_s is None
    assert found.usd is None
    assert found.total_bytes is None
    assert found.up_bytes > 0


def test_an_unknown_price_is_no_zero() -> None:
    found = answer(question(usd_h=None))
    assert found.usd is None
    assert found.hardware_usd is None
    assert found.usd_per_billion_tokens is None
    assert answer(question(usd_h=0.0)).hardware_usd == 0.0


def test_less_traffic_than_a_ring_at_every_step() -> None:
    # Ring, 4 replicas: 3 P each and step, 100 times; gather: 4 P each, once.
    assert answer(question()).reduction == pytest.approx(75, rel=1e-3)
    assert answer(question(num_replicas=1)).reduction is None


def test_the_curve_has_the_chosen_h_and_rises() -> None:
    found = plan(question(sync_every=130, num_fragments=5))
    values = [a.sync_every for a in found.curve]
    assert values == sorted(set(values))
    assert 130 in values
    assert all(h % 5 == 0 for h in values)
    assert found.chosen is found.curve[values.index(130)]
    assert found.best == max(found.curve, key=lambda a: a.efficiency).sync_every


@pytest.mark.parametrize(
    "changes",
    [
        {"overlap_steps": 99},
        {"overlap_steps": 99, "num_fragments": 50},
        {"tokens": 1},
        {"tokens": 10**17, "sync_every": LARGEST_H},
        {"num_fragments": 100},
    ],
)
def test_every_h_of_the_sweep_can_be(changes: dict[str, Any]) -> None:
    asked = question(**changes)
    for h in sweep(asked):
        answer(dataclasses.replace(asked, sync_every=h))


def test_failures_give_the_curve_a_top() -> None:
    found = plan(question(mtbf_h=2.0, replace_s=60.0, tokens=4_000_000_000))
    values = [a.sync_every for a in found.curve]
    assert values[0] < found.best < values[-1]


def test_the_bandwidth_that_is_enough_is_enough() -> None:
    asked = question(sync_every=20)
    needed = plan(asked).enough_mbit_s
    assert needed is not None
    there = answer(dataclasses.replace(asked, mbit_s=needed))
    assert there.utilisation == pytest.approx(0.95, rel=1e-3)
    assert plan(question(sync_every=1, step_s=0.01, latency_s=1.0)).enough_mbit_s is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_fragments": 3}, "num_fragments"),
        ({"overlap_steps": 100}, "overlap_steps"),
        ({"min_quorum": 5}, "min_quorum"),
        ({"parameters": 0}, "parameters"),
        ({"step_s": 0.0}, "step_s"),
        ({"tokens": 0}, "tokens"),
        ({"tokens_per_step": 0}, "tokens_per_step"),
        ({"codec": "zip"}, "codec"),
    ],
)
def test_what_cannot_be_is_said_at_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as found:
        plan(question(**changes))
    assert found.value.field == field
