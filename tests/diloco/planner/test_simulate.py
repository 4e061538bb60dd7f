"""The prediction of a plan: its formulas worked by hand, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest

from diloco.planner import availability
from diloco.planner.prediction import (
    BEAT_GETS,
    BEAT_INTERVAL_S,
    BEAT_PUTS,
    Scenario,
    bandwidth_for,
    predict,
    predict_modes,
)
from diloco.planner.traffic import round_traffic
from diloco.protocol.reduce_cost import RoundCost, round_cost
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.simulate import main


def settings(**changes: Any) -> GroupSettings:
    chosen = {
        "num_replicas": 8, "sync_every": 100, "total_rounds": 10, "codec": "bf16",
        "warmup_steps": 0, "reduce_plan": "gather", **changes,
    }  # fmt: skip
    return GroupSettings(**chosen)


def scenario(**changes: Any) -> Scenario:
    """``changes`` are the scenario's, or else its group's."""
    names = {field.name for field in dataclasses.fields(Scenario)}
    group = {name: value for name, value in changes.items() if name not in names}
    world = {name: value for name, value in changes.items() if name in names}
    chosen = {"parameters": 1_000_000, "step_s": 1.0, "latency_s": 0.0, **world}
    return Scenario(settings=settings(**group), **chosen)


# -- utilisation -----------------------------------------------------------------------------------


def test_an_exchange_is_up_then_down() -> None:
    found = predict(scenario(up_bytes_per_s=1e5, down_bytes_per_s=1e6))
    cost = found.traffic.replica
    assert (cost.up, cost.down) == (2_000_256, 14_000_000)
    assert found.exposed_s == found.exchange_s == pytest.approx(cost.up / 1e5 + cost.down / 1e6)
    assert found.utilisation == pytest.approx(100 / (100 + found.exchange_s))


def test_latency_is_paid_by_trip() -> None:
    found = predict(scenario(latency_s=0.5))
    cost = found.traffic.replica
    trips = math.ceil((cost.puts + cost.gets) / 4) + 2
    assert found.exchange_s == pytest.approx((cost.up + cost.down) / 100e6 + 0.5 * trips)


def test_a_syncer_takes_its_time_too_at_ten_times_the_speed() -> None:
    found = predict(scenario(reduce_plan="syncer", latency_s=0.5))
    replica, syncer = found.traffic.replica, found.traffic.syncer
    assert (syncer.up, syncer.down) == (2_000_000, 8 * 2_000_000)
    moved_s = (replica.up + replica.down) / 100e6 + (syncer.up + syncer.down) / 1000e6
    trips = replica.round_trips + syncer.round_trips / 10
    assert found.exchange_s == pytest.approx(moved_s + 0.5 * trips)


def test_overlap_hides_its_steps_and_no_more() -> None:
    slow = {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6}
    whole = predict(scenario(**slow)).exchange_s
    assert predict(scenario(overlap_steps=3, **slow)).exposed_s == pytest.approx(whole - 3)
    assert predict(scenario(overlap_steps=99, **slow)).exposed_s == 0


def test_rounds_that_overlap_share_the_line() -> None:
    """50 fragments: a round computes 2 s; its exchange may take 90, but not every 2 s again."""
    found = predict(
        scenario(num_fragments=50, overlap_steps=90, up_bytes_per_s=1e4, down_bytes_per_s=1e6)
    )
    assert found.compute_s == 2
    assert 2 < found.exchange_s < 90
    assert found.exposed_s == pytest.approx(found.exchange_s - 2)


def test_fragments_divide_the_bytes_of_a_round_not_of_the_run() -> None:
    one, four = scenario(), scenario(num_fragments=4, total_rounds=40)
    assert predict(four).traffic.replica.down * 4 == predict(one).traffic.replica.down
    assert predict(four).down == predict(one).down
    assert predict(four).compute_s * 4 == predict(one).compute_s


@pytest.mark.parametrize("mode", ["gather", "sharded", "syncer"])
@pytest.mark.parametrize("overlap", [0, 5, 30])
def test_the_bandwidth_for_a_utilisation_gives_that_utilisation(mode: str, overlap: int) -> None:
    plan = scenario(
        reduce_plan=mode, overlap_steps=overlap, num_fragments=5, parameters=10**8, latency_s=0.01
    )
    for share in (0.5, 0.9, 0.99):
        rate = bandwidth_for(plan, share)
        found = predict(dataclasses.replace(plan, up_bytes_per_s=rate, down_bytes_per_s=rate))
        assert found.utilisation == pytest.approx(share)


def test_latency_alone_can_forbid_a_utilisation() -> None:
    assert bandwidth_for(scenario(latency_s=10.0), 0.99) == math.inf


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gather", "sharded", "syncer"])
@pytest.mark.parametrize("codec", ["fp32", "int8", "topk"])
@pytest.mark.parametrize("parameters", [5, 70_000, 3_000_001])
def test_traffic_is_the_sum_over_ranks(mode: str, codec: str, parameters: int) -> None:
    group = settings(codec=codec, num_replicas=5, num_fragments=5)
    found = round_traffic(group, parameters, mode=mode)
    ranks = [
        round_cost(
            numel=-(-parameters // 5), codec=codec, replicas=5, mode=mode, rank=rank, topk=64
        )
        for rank in range(5)
    ]
    for name in ("up", "down", "puts", "gets"):
        everybody = [*ranks, found.syncer]
        assert getattr(found, name) == sum(getattr(cost, name) for cost in everybody)
    assert found.egress == sum(cost.down for cost in ranks)
    assert (found.syncer == RoundCost(stages=0)) == (mode != "syncer")


def test_a_thousand_replicas_are_no_effort() -> None:
    found = round_traffic(
        settings(num_replicas=1024, max_replicas=1024), 7_000_000_000, mode="sharded"
    )
    assert found.up > 1024 * 2 * 7_000_000_000


def test_auto_is_what_a_group_would_take() -> None:
    assert scenario(reduce_plan="auto", parameters=1000).mode == "gather"
    assert scenario(reduce_plan="auto", parameters=10**9).mode == "sharded"
    assert scenario(num_replicas=1, reduce_plan="syncer").mode == "gather"


# -- failures --------------------------------------------------------------------------------------


def test_availability() -> None:
    assert availability.availability(90, 10) == 0.9
    assert availability.availability(math.inf, 10) == 1.0


def test_a_quorum_of_two_of_three() -> None:
    enough, live = availability.quorum(3, 2, 0.9)
    assert enough == pytest.approx(0.9**3 + 3 * 0.9**2 * 0.1)
    assert live == pytest.approx((3 * 0.9**3 + 2 * 3 * 0.9**2 * 0.1) / enough / 3)
    assert availability.quorum(3, 3, 0.9)[0] == pytest.approx(0.9**3)
    assert availability.quorum(1024, 1, 0.99) == (1.0, pytest.approx(0.99))
    assert availability.quorum(5, 5, 1.0) == (1.0, 1.0)


def test_half_a_unit_of_work_is_lost_with_a_replica() -> None:
    assert availability.kept_share(10, 1000) == pytest.approx(1 - 10 / 1000 / 2, rel=1e-4)
    assert availability.kept_share(10, math.inf) == 1.0
    assert availability.kept_share(1e6, 1) == 0.0


@pytest.mark.parametrize(
    ("changes", "expected_s"),
    [
        # Rounds of 100 s, a lease of 20 s, a late successor is 50 s late on average.
        ({"heartbeat_timeout_s": 20.0, "grace_s": 800.0}, 20**2 / 200 + 50),
        ({"heartbeat_timeout_s": 20.0, "grace_s": 0.0}, 0),
        ({"heartbeat_timeout_s": 300.0, "grace_s": 800.0}, 300 - 50 + 50),
        # At most the grace window: late by more than 10 s in 90 % of cases.
        ({"heartbeat_timeout_s": 5.0, "grace_s": 10.0}, 5**2 / 200 + 0.9 * 10 + 0.1 * 5),
        # Overlap hides 40 s: the lease altogether, and of the successor all but 60 s at most.
        ({"heartbeat_timeout_s": 20.0, "grace_s": 800.0, "overlap_steps": 40}, 60**2 / 200),
        ({"num_replicas": 1}, 0),
    ],
)
def test_waiting_because_of_a_failure(changes: dict[str, Any], expected_s: float) -> None:
    found = availability.stall_of_a_failure_s(settings(**changes), step_s=1.0)
    assert found == pytest.approx(expected_s)


def test_goodput_is_what_is_done_against_healthy_replicas() -> None:
    healthy = predict(scenario(tokens_per_step=100))
    failing = predict(scenario(tokens_per_step=100, mtbf_s=3600, replace_s=60))
    assert healthy.outlook.goodput == 1.0
    assert healthy.tokens == 10 * 8 * 100 * 100
    gone = failing.tokens_per_s / healthy.tokens_per_s
    assert failing.outlook.goodput == pytest.approx(gone)
    assert failing.efficiency == pytest.approx(gone * failing.utilisation)
    assert 0.8 < gone < 1


def test_a_high_quorum_waits_and_a_low_one_goes_on() -> None:
    patient = predict(scenario(min_quorum=8, mtbf_s=3600, replace_s=600, grace_s=0.0))
    decoupled = predict(scenario(min_quorum=1, mtbf_s=3600, replace_s=600, grace_s=0.0))
    assert patient.wall_s > 3 * decoupled.wall_s
    assert patient.outlook.goodput < decoupled.outlook.goodput


def test_a_group_that_cannot_live_is_said_to() -> None:
    found = predict(
        scenario(min_quorum=8, mtbf_s=1e-60, replace_s=1e6, replica_per_hour=1.0, step_s=60.0)
    )
    assert found.outlook.goodput == found.tokens == 0
    assert found.wall_s == math.inf


# -- money -----------------------------------------------------------------------------------------


def test_the_bill() -> None:
    found = predict(scenario(replica_per_hour=3.6, egress_per_gb=0.1, total_rounds=7))
    assert found.cost.hardware == pytest.approx(8 * 3.6 * found.wall_s / 3600)
    assert found.cost.egress == pytest.approx(7 * 8 * 14_000_000 / 1e9 * 0.1)
    beats = 8 * found.wall_s / BEAT_INTERVAL_S
    assert found.puts == pytest.approx(7 * found.traffic.puts + beats * BEAT_PUTS)
    assert found.gets == pytest.approx(7 * found.traffic.gets + beats * BEAT_GETS)
    assert found.cost.requests == pytest.approx(found.puts * 5e-6 + found.gets * 0.4e-6)
    assert found.cost.total == pytest.approx(
        found.cost.hardware + found.cost.egress + found.cost.requests
    )


def test_the_syncer_is_paid_but_reads_for_nothing() -> None:
    found = predict(scenario(reduce_plan="syncer", syncer_per_hour=3.6, egress_per_gb=1.0))
    assert found.cost.hardware == pytest.approx(3.6 * found.wall_s / 3600)
    assert found.cost.egress == pytest.approx(10 * 8 * 2_000_000 / 1e9)


def test_a_returning_replica_reads_a_checkpoint() -> None:
    found = predict(scenario(mtbf_s=1e4, replace_s=10))
    rounds = 10 * found.outlook.live_share * found.traffic.down
    assert found.down == pytest.approx(rounds + found.failures * 8 * 1_000_000)


def test_a_token_limit_ends_with_the_round_that_reaches_it() -> None:
    assert predict(scenario(tokens_per_step=10, max_tokens=3 * 8000 + 1)).rounds == 4
    assert predict(scenario(max_tokens=5)).rounds == 10


def test_all_reduce_plans_beside_each_other() -> None:
    found = predict_modes(scenario())
    assert list(found) == ["gather", "sharded", "syncer"]
    assert {mode: plan.traffic.mode for mode, plan in found.items()} == {m: m for m in found}
    assert list(predict_modes(scenario(num_replicas=1))) == ["gather"]


# -- bad input, and the command --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"parameters": 0}, "parameters"),
        ({"step_s": math.inf}, "step_s"),
        ({"mtbf_s": math.nan}, "mtbf_s"),
        ({"egress_per_gb": -1.0}, "egress_per_gb"),
        ({"parameters": 3, "num_fragments": 4}, "parameters"),
    ],
)
def test_an_impossible_world_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError, match=r"expected .*, found") as error:
        scenario(**changes)
    assert error.value.field == field


PLAN = ["--parameters", "1B", "--num-replicas", "8", "--sync-every", "500", "--codec", "bf16",
        "--step-s", "1", "--mtbf-hours", "24", "--replace-s", "120"]  # fmt: skip


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    text = capsys.readouterr().out
    assert "8 replicas, 1,000,000,000 parameters, bf16, sharded (auto)" in text
    chosen = next(line for line in text.splitlines() if line.startswith("* "))
    assert chosen.split()[1] == "sharded"
    assert "failures" in text and "efficiency" in text


def test_the_command_prints_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["scenario"]["settings"]["sync_every"] == 500
    assert body["prediction"]["traffic"]["mode"] == "sharded"
    assert body["reduce_plans"]["sharded"] == body["prediction"]
    assert body["bytes_per_s_for_utilisation"]["0.99"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--up-mbit-s", "0"], "error: --up-mbit-s: expected more than 0, found 0"),
        (["--num-replicas", "1.5"], "error: --num-replicas: expected a whole number, found 1.5"),
        (["--num-fragments", "3"], "error: --num-fragments: expected a divisor of the 50 local"),
        (["--codec", "zip"], "error: --codec: expected one of fp32, bf16"),
        (["--parameters", "1.5"], "error: --parameters: expected a whole number, found 1.5"),
        (["--settings", "/nowhere"], "error: --settings: "),
    ],
)
def test_bad_options_have_status_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--parameters", "1M", "--step-s", "1", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", ["x", "-1", "nan", "1x", ""])
def test_what_is_no_number_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--parameters", value, "--step-s", "1"])
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    code = "import sys, diloco.simulate; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
