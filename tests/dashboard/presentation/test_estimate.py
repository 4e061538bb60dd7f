"""The formulas of the estimate, compared with values computed by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dashboard.presentation.estimate import estimate
from diloco.protocol.blocks import HEADER_BYTES, block_elements
from diloco.protocol.payload_size import checked_bytes
from diloco.protocol.reduce_cost import round_cost
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import GPT_SIZES, ByteGPTWorkload
from runs.submit.run_draft import PoolDraft, RunDraft


def draft(*, size: str = "mini", **changes: Any) -> RunDraft:
    settings = GroupSettings(
        **{"num_replicas": 4, "sync_every": 50, "batch_size": 8, "total_rounds": 20}
        | {"reduce_plan": "gather", "warmup_steps": 0}
        | changes
    )
    return RunDraft(
        name="x",
        settings=settings,
        workload=ByteGPTWorkload(size=size),
        pools=(PoolDraft(count=settings.num_replicas),),
    )


def test_traffic_per_round() -> None:
    result = estimate(draft())
    numel = GPT_SIZES["mini"].parameters
    payload = checked_bytes(numel, "fp32", block=block_elements(numel))
    assert 4 * numel < payload < 4.001 * numel
    assert result.reduce_plan == "gather"
    assert result.up_bytes_per_round == HEADER_BYTES + payload
    assert result.down_bytes_per_round == 3 * payload
    assert result.total_bytes == 20 * 4 * (HEADER_BYTES + payload + 3 * payload)


def test_bf16_halves_the_traffic() -> None:
    fp32, bf16 = estimate(draft()), estimate(draft(codec="bf16"))
    assert bf16.down_bytes_per_round * 2 == pytest.approx(fp32.down_bytes_per_round, rel=1e-4)


def test_top_k_sends_the_configured_fraction() -> None:
    chunks = -(-GPT_SIZES["mini"].parameters // 4096)
    few, many = estimate(draft(codec="topk", topk=8)), estimate(draft(codec="topk", topk=16))
    assert many.up_bytes_per_round - few.up_bytes_per_round == pytest.approx(chunks * 8 * 3, abs=24)


def test_a_round_exchanges_one_fragment() -> None:
    one, five = estimate(draft()), estimate(draft(num_fragments=5, total_rounds=100))
    assert five.down_bytes_per_round == pytest.approx(one.down_bytes_per_round / 5, abs=16)
    assert five.total_bytes == pytest.approx(one.total_bytes, rel=1e-3)
    assert (five.steps, five.tokens) == (one.steps, one.tokens)


def test_traffic_of_a_sharded_round() -> None:
    """Sharded: three slices of the payload and three reduced shards down, one shard more up."""
    result = estimate(draft(reduce_plan="sharded"))
    payload = GPT_SIZES["mini"].parameters * 4
    assert result.reduce_plan == "sharded"
    block = 4 * 2**16
    assert result.up_bytes_per_round == pytest.approx(payload * (1 + 1 / 4), abs=block)
    assert result.down_bytes_per_round == pytest.approx(2 * 3 * payload / 4, abs=3 * block)
    assert result.total_bytes == pytest.approx(20 * 4 * payload * (1.25 + 1.5), rel=1e-3)


@pytest.mark.parametrize(("size", "plan"), [("demo", "gather"), ("large", "sharded")])
def test_auto_resolves_to_the_plan_of_the_group(size: str, plan: str) -> None:
    assert estimate(draft(size=size, reduce_plan="auto", num_replicas=8)).reduce_plan == plan


def test_tokens() -> None:
    result = estimate(draft())
    assert result.tokens_per_round == 50 * 8 * 256 * 4
    assert result.tokens == 20 * result.tokens_per_round
    assert result.steps == 20 * 50
    fragments = estimate(draft(num_fragments=10))
    assert (fragments.steps, fragments.tokens * 10) == (20 * 5, result.tokens)


def test_a_token_limit_rounds_up_to_a_whole_round() -> None:
    per_round = estimate(draft()).tokens_per_round
    assert estimate(draft(max_tokens=3 * per_round)).rounds == 3
    assert estimate(draft(max_tokens=3 * per_round + 1)).rounds == 4
    assert estimate(draft(max_tokens=10**15)).rounds == 20


def test_reduction_compared_with_all_reduce_per_step() -> None:
    # Ring, 4 replicas: 2 * 3/4 of the gradient up and as much down = 3 P, 50 times; here 4 P once.
    assert estimate(draft()).reduction == pytest.approx(50 * 3 / 4, rel=1e-4)
    assert estimate(draft(num_fragments=5)).reduction == pytest.approx(50 * 3 / 4, rel=1e-3)
    assert estimate(draft(num_replicas=1)).reduction is None


def test_the_effective_json_has_the_submitted_values() -> None:
    wanted = draft()
    body = json.loads(estimate(wanted).effective_json)
    assert body["settings"] == wanted.settings.to_dict()
    assert body["pools"] == [dataclasses.asdict(pool) for pool in wanted.pools]


def test_exchange_time_is_transfer_plus_latency() -> None:
    result = estimate(draft())
    moved = (result.up_bytes_per_round or 0) + (result.down_bytes_per_round or 0)
    cost = round_cost(numel=GPT_SIZES["mini"].parameters, codec="fp32", replicas=4, mode="gather")
    assert result.exchange_s == pytest.approx(moved / 100e6 + cost.round_trips * 0.1)


def test_goodput_and_speed_need_the_throughput_of_earlier_runs() -> None:
    unknown = estimate(draft())
    assert (unknown.goodput, unknown.tokens_per_s) == (None, None)
    # 50 steps of 8 x 256 tokens at 10,240 tokens per second: 10 seconds per round.
    result = estimate(draft(), {("local", "cpu"): 10_240.0})
    assert result.goodput == pytest.approx(10 / (10 + (result.exchange_s or 0)))
    assert result.tokens_per_s == pytest.approx(4 * 10_240)
    overlapped = estimate(draft(overlap_steps=49), {("local", "cpu"): 10_240.0})
    assert overlapped.goodput == 1.0
