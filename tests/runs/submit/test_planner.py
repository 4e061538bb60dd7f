"""The planner's results, calculated by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diloco.protocol.reduce_cost import round_cost
from diloco.protocol.setting_spec import SettingsError
from runs.submit.planner import LARGEST_H, PlannerInputs, plan, point_for, sweep


def question(**changes: Any) -> PlannerInputs:
    return PlannerInputs(
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
    result = point_for(question())
    cost = round_cost(numel=10_000_000, codec="fp32", replicas=4, mode="gather")
    assert (result.up_bytes, result.down_bytes) == (cost.up, cost.down)
    assert result.round_bytes == 4 * (cost.up + cost.down)
    # 40 MB up and 120 MB down at 100 MB/s, one after the other.
    assert result.exchange_s == pytest.approx(1.6, rel=1e-4)
    assert result.exposed_s == result.exchange_s
    assert result.utilisation == pytest.approx(50 / 51.6, rel=1e-4)


def test_a_low_bit_mean_is_a_smaller_download() -> None:
    sharded = {"codec": "e3m0", "num_replicas": 64, "reduce_plan": "sharded"}
    full, low = (point_for(question(**sharded, mean_codec=mean)) for mean in ("full", "e3m0"))
    assert low.up_bytes < full.up_bytes
    assert low.down_bytes < full.down_bytes / 3


def test_the_tokens_determine_the_length_of_the_run() -> None:
    result = point_for(question())
    assert result.rounds == 100  # of 100 steps of 1,000 tokens by four replicas
    assert result.wall_s == pytest.approx(100 * 51.6, rel=1e-4)
    assert result.hardware_usd == pytest.approx(4 * 3.6 * 100 * 51.6 / 3600, rel=1e-4)
    assert result.total_bytes == 100 * result.round_bytes
    assert point_for(question(sync_every=200)).rounds == 50
    assert point_for(question(sync_every=200)).total_bytes == pytest.approx(50 * result.round_bytes)


def test_overlap_hides_the_exchange() -> None:
    result = point_for(question(overlap_steps=2))
    assert result.exposed_s == pytest.approx(0.6, rel=1e-3)
    assert point_for(question(overlap_steps=4)).utilisation == 1.0


def test_fragments_make_rounds_shorter_and_smaller() -> None:
    whole, parts = point_for(question()), point_for(question(num_fragments=5))
    assert parts.rounds == 5 * (whole.rounds or 0)
    assert parts.up_bytes == pytest.approx(whole.up_bytes / 5, rel=1e-3)
    assert parts.total_bytes == pytest.approx(whole.total_bytes, rel=1e-3)


def test_work_lost_to_failures_is_trained_again() -> None:
    healthy, failing = point_for(question()), point_for(question(mtbf_h=0.5, replace_s=60.0))
    assert healthy.goodput == 1.0
    assert failing.goodput < 0.95
    assert (failing.rounds or 0) > (healthy.rounds or 0)
    assert (failing.wall_s or 0) > (healthy.wall_s or 0)
    assert (failing.usd or 0) > (healthy.usd or 0)
    assert failing.efficiency == pytest.approx(failing.utilisation * failing.goodput)
    # The duration is inversely proportional to the efficiency, except for the last round.
    assert (failing.wall_s or 0) == pytest.approx(
        40_000_000 / (4 * 2000 * failing.efficiency), rel=0.02
    )


def test_a_run_that_never_ends_has_no_wall_time() -> None:
    result = point_for(question(mtbf_h=0.0001, replace_s=600.0, min_quorum=4))
    assert result.rounds is None
    assert result.wall_s is None
    assert result.usd is None
    assert result.total_bytes is None
    assert result.up_bytes > 0


def test_an_unknown_price_is_not_zero() -> None:
    result = point_for(question(usd_h=None))
    assert result.usd is None
    assert result.hardware_usd is None
    assert result.usd_per_billion_tokens is None
    assert point_for(question(usd_h=0.0)).hardware_usd == 0.0


def test_less_traffic_than_a_ring_at_every_step() -> None:
    # Ring, 4 replicas: 3 P each and step, 100 times; gather: 4 P each, once.
    assert point_for(question()).reduction == pytest.approx(75, rel=1e-3)
    assert point_for(question(num_replicas=1)).reduction is None


def test_the_curve_has_the_chosen_h_and_rises() -> None:
    result = plan(question(sync_every=130, num_fragments=5))
    values = [a.sync_every for a in result.curve]
    assert values == sorted(set(values))
    assert 130 in values
    assert all(h % 5 == 0 for h in values)
    assert result.chosen is result.curve[values.index(130)]
    assert result.best == max(result.curve, key=lambda a: a.efficiency).sync_every


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
def test_every_h_of_the_sweep_is_valid(changes: dict[str, Any]) -> None:
    base = question(**changes)
    for h in sweep(base):
        point_for(dataclasses.replace(base, sync_every=h))


def test_failures_give_the_curve_a_maximum() -> None:
    result = plan(question(mtbf_h=2.0, replace_s=60.0, tokens=4_000_000_000))
    values = [a.sync_every for a in result.curve]
    assert values[0] < result.best < values[-1]


def test_the_required_bandwidth_reaches_the_utilisation() -> None:
    base = question(sync_every=20)
    needed = plan(base).enough_mbit_s
    assert needed is not None
    there = point_for(dataclasses.replace(base, mbit_s=needed))
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
def test_invalid_inputs_are_refused_at_their_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as result:
        plan(question(**changes))
    assert result.value.field == field
