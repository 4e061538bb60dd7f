"""The prediction of a run: formulas worked by hand, and the command."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import subprocess
import sys
from typing import Any

import pytest

from diloco.group import join
from diloco.planner import availability
from diloco.planner.prediction import (
    PlanRequest,
    bandwidth_for,
    predict,
    predict_modes,
)
from diloco.planner.traffic import round_traffic
from diloco.protocol.control_pace import TELEMETRY_INTERVAL_S, USUAL_FAILED_POLLS
from diloco.protocol.reduce_cost import RoundCost, round_cost
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.simulate import main


def settings(**changes: Any) -> GroupSettings:
    chosen = {
        "num_replicas": 8,
        "sync_every": 100,
        "total_rounds": 10,
        "codec": "bf16",
        "warmup_steps": 0,
        "reduce_plan": "gather",
        **changes,
    }
    return GroupSettings(**chosen)


def request(**changes: Any) -> PlanRequest:
    """A request; ``changes`` are fields of the request or settings of its group."""
    names = {field.name for field in dataclasses.fields(PlanRequest)}
    group = {name: value for name, value in changes.items() if name not in names}
    harness = {name: value for name, value in changes.items() if name in names}
    chosen = {"parameters": 1_000_000, "step_s": 1.0, "latency_s": 0.0, **harness}
    return PlanRequest(settings=settings(**group), **chosen)


# -- utilisation -----------------------------------------------------------------------------------


def test_an_exchange_is_up_then_down() -> None:
    result = predict(request(up_bytes_per_s=1e5, down_bytes_per_s=1e6))
    cost = result.traffic.replica
    assert (cost.up, cost.down) == (2_000_384, 14_000_896)
    assert result.exposed_s == result.exchange_s == pytest.approx(cost.up / 1e5 + cost.down / 1e6)
    assert result.utilisation == pytest.approx(100 / (100 + result.exchange_s))


def test_latency_counts_once_per_round_trip() -> None:
    result = predict(request(latency_s=0.5))
    cost = result.traffic.replica
    trips = math.ceil((cost.puts + cost.gets) / 4) + 2
    assert result.exchange_s == pytest.approx((cost.up + cost.down) / 100e6 + 0.5 * trips)


def test_a_syncer_adds_its_transfers_at_ten_times_the_bandwidth() -> None:
    result = predict(request(reduce_plan="syncer", latency_s=0.5))
    replica, syncer = result.traffic.replica, result.traffic.syncer
    assert (syncer.up, syncer.down) == (2_000_000, 8 * 2_000_128)
    moved_s = (replica.up + replica.down) / 100e6 + (syncer.up + syncer.down) / 1000e6
    trips = replica.round_trips + syncer.round_trips / 10
    assert result.exchange_s == pytest.approx(moved_s + 0.5 * trips)


def test_overlap_hides_at_most_its_steps() -> None:
    slow = {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6}
    whole = predict(request(**slow)).exchange_s
    assert predict(request(overlap_steps=3, **slow)).exposed_s == pytest.approx(whole - 3)
    assert predict(request(overlap_steps=99, **slow)).exposed_s == 0


def test_rounds_that_overlap_share_the_line() -> None:
    """50 fragments: a round computes for 2 s. An exchange can take 90 s, but not one every 2 s."""
    result = predict(
        request(num_fragments=50, overlap_steps=90, up_bytes_per_s=1e4, down_bytes_per_s=1e6)
    )
    assert result.compute_s == 2
    assert 2 < result.exchange_s < 90
    assert result.exposed_s == pytest.approx(result.exchange_s - 2)


def test_fragments_divide_the_bytes_of_a_round_not_of_the_run() -> None:
    one, four = request(), request(num_fragments=4, total_rounds=40)
    assert predict(four).traffic.replica.down * 4 == predict(one).traffic.replica.down
    assert predict(four).down == predict(one).down
    assert predict(four).compute_s * 4 == predict(one).compute_s


@pytest.mark.parametrize("mode", ["gather", "sharded", "syncer"])
@pytest.mark.parametrize("overlap", [0, 5, 30])
def test_the_bandwidth_for_a_utilisation_gives_that_utilisation(mode: str, overlap: int) -> None:
    plan = request(
        reduce_plan=mode, overlap_steps=overlap, num_fragments=5, parameters=10**8, latency_s=0.01
    )
    for share in (0.5, 0.9, 0.99):
        rate = bandwidth_for(plan, share)
        result = predict(dataclasses.replace(plan, up_bytes_per_s=rate, down_bytes_per_s=rate))
        assert result.utilisation == pytest.approx(share)


def test_latency_alone_can_forbid_a_utilisation() -> None:
    assert bandwidth_for(request(latency_s=10.0), 0.99) == math.inf


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gather", "sharded", "syncer"])
@pytest.mark.parametrize(
    ("codec", "mean_codec"),
    [("fp32", "full"), ("int8", "full"), ("topk", "full"), ("int8", "e3m0")],
)
@pytest.mark.parametrize("parameters", [5, 70_000, 3_000_001])
def test_traffic_is_the_sum_over_ranks(
    mode: str, codec: str, mean_codec: str, parameters: int
) -> None:
    group = settings(
        codec=codec,
        mean_codec=mean_codec,
        reduce_plan="auto",
        num_replicas=5,
        num_fragments=5,
    )
    result = round_traffic(group, parameters, mode=mode)
    ranks = [
        round_cost(
            numel=-(-parameters // 5),
            codec=codec,
            mean_codec=mean_codec,
            replicas=5,
            mode=mode,
            rank=rank,
            topk=64,
        )
        for rank in range(5)
    ]
    for name in ("up", "down", "puts", "gets"):
        costs = [*ranks, result.syncer]
        assert getattr(result, name) == sum(getattr(cost, name) for cost in costs)
    assert result.egress == sum(cost.down for cost in ranks)
    assert (result.syncer == RoundCost(stages=0)) == (mode != "syncer")


def test_a_thousand_replicas_are_computed_quickly() -> None:
    result = round_traffic(
        settings(num_replicas=1024, max_replicas=1024), 7_000_000_000, mode="sharded"
    )
    assert result.up > 1024 * 2 * 7_000_000_000


def test_auto_selects_the_plan_of_the_group() -> None:
    assert request(reduce_plan="auto", parameters=1000).mode == "gather"
    assert request(reduce_plan="auto", parameters=10**9).mode == "sharded"
    assert request(num_replicas=1, reduce_plan="syncer").mode == "gather"


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


def test_a_failure_loses_half_a_unit_of_work() -> None:
    assert availability.kept_share(10, 1000) == pytest.approx(1 - 10 / 1000 / 2, rel=1e-4)
    assert availability.kept_share(10, math.inf) == 1.0
    assert availability.kept_share(1e6, 1) == 0.0


WHOLE = {"partial_rounds": "off"}


@pytest.mark.parametrize(
    ("changes", "expected_s"),
    [
        # Rounds of 100 s, suspected after 20 s, a successor that is 50 s late on average.
        ({**WHOLE, "heartbeat_timeout_s": 40.0, "grace_s": 800.0}, 20 * 0.2 + 10 * 0.2 + 50),
        # A successor that is last ends its round within one heartbeat, of 8 s.
        (
            {"heartbeat_timeout_s": 40.0, "grace_s": 800.0},
            20 * 0.2 + 10 * 0.2 + 8 * 0.92 + 4 * 0.08,
        ),
        ({"heartbeat_timeout_s": 40.0, "grace_s": 0.0}, 0),
        # Rounds shorter than the timeout: suspected 300 s after its failure.
        ({**WHOLE, "heartbeat_timeout_s": 600.0, "grace_s": 800.0}, 250 + 50),
        # At most the grace window: the successor is late by more than 10 s in 90 % of cases.
        (
            {**WHOLE, "heartbeat_timeout_s": 10.0, "grace_s": 10.0},
            5 * 0.05 + 2.5 * 0.05 + 0.9 * 10 + 0.1 * 5,
        ),
        # Overlap hides 40 s: the whole lease, and all but at most 60 s of the successor's delay.
        ({**WHOLE, "heartbeat_timeout_s": 40.0, "grace_s": 800.0, "overlap_steps": 40}, 18),
        ({"num_replicas": 1}, 0),
    ],
)
def test_the_stall_of_a_failure(changes: dict[str, Any], expected_s: float) -> None:
    result = availability.stall_of_a_failure_s(settings(**changes), step_s=1.0)
    assert result == pytest.approx(expected_s)


def test_goodput_is_relative_to_healthy_replicas() -> None:
    healthy = predict(request(tokens_per_step=100))
    failing = predict(request(tokens_per_step=100, mtbf_s=3600, replace_s=60))
    assert healthy.outlook.goodput == 1.0
    assert healthy.tokens == 10 * 8 * 100 * 100
    missing = failing.tokens_per_s / healthy.tokens_per_s
    assert failing.outlook.goodput == pytest.approx(missing)
    assert failing.efficiency == pytest.approx(missing * failing.utilisation)
    assert 0.8 < missing < 1


def test_a_high_quorum_waits_and_a_low_one_continues() -> None:
    patient = predict(request(min_quorum=8, mtbf_s=3600, replace_s=600, grace_s=0.0))
    decoupled = predict(request(min_quorum=1, mtbf_s=3600, replace_s=600, grace_s=0.0))
    assert patient.wall_s > 3 * decoupled.wall_s
    assert patient.outlook.goodput < decoupled.outlook.goodput


def test_a_group_without_progress_has_no_goodput_and_never_ends() -> None:
    result = predict(
        request(min_quorum=8, mtbf_s=1e-60, replace_s=1e6, replica_per_hour=1.0, step_s=60.0)
    )
    assert result.outlook.goodput == result.tokens == 0
    assert result.wall_s == math.inf


# -- cost ------------------------------------------------------------------------------------------


def test_the_cost_of_a_run() -> None:
    result = predict(request(replica_per_hour=3.6, egress_per_gb=0.1, total_rounds=7))
    assert result.cost.hardware == pytest.approx(8 * 3.6 * result.wall_s / 3600)
    assert result.cost.egress == pytest.approx(7 * result.traffic.down / 1e9 * 0.1)
    looks = 8 * result.wall_s / 3  # a fifth of the timeout
    awaited = 8 * (7 * 30 + (result.wall_s - 7 * 30) / 2) / 3  # often in the last two timeouts
    beats = 8 * (7 * 2 + (result.wall_s - 7 * 15) / 45)
    segments = 8 * result.wall_s / TELEMETRY_INTERVAL_S
    lists, polls, records_and_leases = 2 * 3 + 2 + 8, 8 * 8, 0.9 * 2 * 8
    polls += 8 * USUAL_FAILED_POLLS  # for payloads, before there is a plan
    assert result.puts == pytest.approx(7 * (result.traffic.puts + lists) + beats + segments)
    assert result.gets == pytest.approx(
        7 * (result.traffic.gets + polls + records_and_leases) + (1 / 4 + 1 / 10) * looks + awaited
    )
    assert result.cost.requests == pytest.approx(result.puts * 5e-6 + result.gets * 0.4e-6)
    assert result.cost.total == pytest.approx(
        result.cost.hardware + result.cost.egress + result.cost.requests
    )


def test_a_longer_heartbeat_timeout_costs_fewer_requests() -> None:
    short, long = (predict(request(heartbeat_timeout_s=seconds)) for seconds in (15.0, 60.0))
    beats = [8 * (short.wall_s - 10 * seconds) / (3 * seconds) for seconds in (15.0, 60.0)]
    assert short.puts - long.puts == pytest.approx(beats[0] - beats[1])
    assert short.gets > long.gets


def test_the_planner_counts_the_default_intervals() -> None:
    parameter = inspect.signature(join).parameters["telemetry_interval_s"]
    assert parameter.default == TELEMETRY_INTERVAL_S


def test_a_syncer_adds_hardware_cost_but_no_egress() -> None:
    result = predict(request(reduce_plan="syncer", syncer_per_hour=3.6, egress_per_gb=1.0))
    assert result.cost.hardware == pytest.approx(3.6 * result.wall_s / 3600)
    assert result.cost.egress == pytest.approx(10 * 8 * 2_000_000 / 1e9)


def test_a_returning_replica_reads_a_checkpoint() -> None:
    result = predict(request(mtbf_s=1e4, replace_s=10))
    rounds = 10 * result.outlook.live_share * result.traffic.down
    assert result.down == pytest.approx(rounds + result.failures * 8 * 1_000_000)


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.25, 0.0])
@pytest.mark.parametrize("late_share", [0.5, 0.2])
def test_late_work_enters_with_the_share_that_is_kept(keep: float, late_share: float) -> None:
    """Work enters whole if one round is missed, and with a factor ``keep`` for each further one in
    a row, counted from the first that the replica missed."""
    share = 0.0
    for earlier in range(60):  # rounds that were missed before that of the work
        for missed in range(60):
            factors = max(0, missed - (earlier == 0)) if keep else missed
            chance = (1 - late_share) ** 2 * late_share ** (earlier + missed)
            share += chance * keep**factors
    result = predict(request(late_share=late_share, late_keep=keep, tokens_per_step=10))
    assert result.outlook.kept_share == pytest.approx(share)
    assert result.tokens == pytest.approx(share * predict(request(tokens_per_step=10)).tokens)


def test_a_token_limit_ends_with_the_round_that_reaches_it() -> None:
    assert predict(request(tokens_per_step=10, max_tokens=3 * 8000 + 1)).rounds == 4
    assert predict(request(max_tokens=5)).rounds == 10


def test_all_reduce_plans_are_compared() -> None:
    result = predict_modes(request())
    assert list(result) == ["gather", "sharded", "syncer"]
    assert {mode: plan.traffic.mode for mode, plan in result.items()} == {m: m for m in result}
    assert list(predict_modes(request(num_replicas=1))) == ["gather"]
    compressed = predict_modes(request(reduce_plan="auto", mean_codec="int8"))
    assert compressed["gather"] == result["gather"]
    assert compressed["sharded"] != result["sharded"]


# -- bad input, and the command --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"parameters": 0}, "parameters"),
        ({"step_s": math.inf}, "step_s"),
        ({"mtbf_s": math.nan}, "mtbf_s"),
        ({"egress_per_gb": -1.0}, "egress_per_gb"),
        ({"late_share": 1.0}, "late_share"),
        ({"parameters": 3, "num_fragments": 4}, "parameters"),
    ],
)
def test_the_error_names_an_impossible_value(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError, match=r"expected .*, found") as error:
        request(**changes)
    assert error.value.field == field


PLAN = [
    "--parameters",
    "1B",
    "--num-replicas",
    "8",
    "--sync-every",
    "500",
    "--codec",
    "bf16",
    "--step-s",
    "1",
    "--mtbf-hours",
    "24",
    "--replace-s",
    "120",
]


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
def test_a_value_that_is_not_a_number_is_refused(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--parameters", value, "--step-s", "1"])
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_the_command_does_not_import_torch() -> None:
    code = "import sys, diloco.simulate; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
