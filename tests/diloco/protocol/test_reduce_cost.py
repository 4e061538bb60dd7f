"""The cost model counts the exact traffic of a round and selects the cheapest plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.plan_traffic import CODECS, differences, one_round
from bench.support.cuts import small_cuts
from diloco.exchange.upload import VERIFY_UPLOAD_BYTES
from diloco.protocol.blocks import (
    LARGEST_BLOCK,
    Span,
    block_elements,
    largest_shard,
    part_count,
    part_spans,
    shard_spans,
)
from diloco.protocol.payload_size import FULL_MEAN
from diloco.protocol.reduce_cost import cheapest_plan, round_cost, shards_per_owner
from tests.matrix import matrix

NUMEL = 50_003
"""Thirteen blocks of 4,096 elements: unequal shards, and a last block of 851."""


@matrix("replicas", [2, 3, 4, 5], fast=(3,))
@pytest.mark.parametrize("plan", ["gather", "sharded", "syncer"])
def test_a_round_transfers_exactly_the_computed_bytes(
    tmp_path: Path, plan: str, replicas: int
) -> None:
    torch.set_num_threads(1)
    codec = CODECS[replicas - 1]  # bf16, int8, e3m0, topk
    with small_cuts(part_bytes=16_384):
        for name in ("fp32", codec):
            case = {"replicas": replicas, "plan": plan, "codec": name, "numel": NUMEL}
            assert differences(one_round(tmp_path / name, **case), **case) == []


@pytest.mark.parametrize(("replicas", "per_owner"), [(2, 2), (3, 2), (4, 1)])
def test_large_shards_are_two_of_each_owner(tmp_path: Path, replicas: int, per_owner: int) -> None:
    torch.set_num_threads(1)
    case = {"replicas": replicas, "codec": "fp32", "numel": 2 * NUMEL}
    with small_cuts(part_bytes=16_384):
        assert shards_per_owner(**case) == per_owner
        for mean_codec in (FULL_MEAN, "int8"):
            round = {**case, "plan": "sharded", "mean_codec": mean_codec}
            assert differences(one_round(tmp_path / mean_codec, **round), **round) == []


@matrix("mean_codec", ["int8", "e3m0"], fast=1)
@pytest.mark.parametrize("plan", ["sharded", "syncer"])
def test_a_low_bit_mean_and_its_residual_transfer_exactly_the_computed_bytes(
    tmp_path: Path, plan: str, mean_codec: str
) -> None:
    torch.set_num_threads(1)
    with small_cuts(part_bytes=16_384):
        for numel in (10, NUMEL):
            case = {
                "replicas": 3,
                "plan": plan,
                "codec": "e3m0",
                "numel": numel,
                "mean_codec": mean_codec,
            }
            assert differences(one_round(tmp_path / str(numel), **case), **case) == []


def test_four_bits_up_and_down_take_less_than_the_full_mean_alone() -> None:
    sharded = {"numel": 10**9, "codec": "e3m0", "replicas": 64, "mode": "sharded"}
    four_bits = round_cost(**sharded, mean_codec="e3m0")
    assert four_bits.up + four_bits.down < 1.6e9
    full = round_cost(**sharded)
    assert full.up + full.down > 5e9


@pytest.mark.parametrize("verify_bytes", [0, 1, 40_000, 150_000, 10**9])
def test_reading_back_an_upload_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify_bytes: int
) -> None:
    monkeypatch.setenv(VERIFY_UPLOAD_BYTES, str(verify_bytes))
    with small_cuts(part_bytes=16_384):
        for codec in ("fp32", "int8"):
            case = {"replicas": 2, "plan": "gather", "codec": codec, "numel": NUMEL}
            assert differences(one_round(tmp_path / codec, **case), **case) == []


@pytest.mark.parametrize("plan", ["gather", "sharded", "syncer"])
def test_a_round_of_less_than_a_block_leaves_shards_empty(tmp_path: Path, plan: str) -> None:
    case = {"replicas": 3, "plan": plan, "codec": "fp32", "numel": 10}
    assert differences(one_round(tmp_path, **case), **case) == []


@pytest.mark.parametrize("replicas", [2, 4, 16])
def test_the_bytes_are_those_of_the_protocol(replicas: int) -> None:
    """Without headers: gather (N - 1) Sc; sharded (N - 1)(Sc + Sr) / N; syncer Sr."""
    numel = 2**16 * 16 * 15  # shards of equal length
    for codec, size, reduced in (("fp32", 4, 4), ("bf16", 2, 2), ("int8", 260 / 256, 4)):
        sc, sr = size * numel + 8 * 16 * 15, reduced * numel  # a checksum in each block
        down = {
            mode: round_cost(numel=numel, codec=codec, replicas=replicas, mode=mode).down
            for mode in ("gather", "sharded", "syncer")
        }
        assert down["gather"] == (replicas - 1) * sc
        assert down["sharded"] == (replicas - 1) * (sc + sr) / replicas
        assert down["syncer"] == sr


def test_auto_gathers_small_models_and_shards_large_ones() -> None:
    few, many = 10_000, 100_000_000
    assert cheapest_plan(numel=few, codec="fp32", replicas=4, syncer=False) == "gather"
    assert cheapest_plan(numel=many, codec="fp32", replicas=8, syncer=False) == "sharded"
    assert cheapest_plan(numel=many, codec="fp32", replicas=4, syncer=True) == "syncer"


@pytest.mark.parametrize("plan", ["gather", "sharded", "syncer"])
def test_the_cost_of_a_huge_model_is_computed_without_lists(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of the parts of 10^14 parameters, 24 million per payload, would exhaust the memory."""
    replicas, made = 64, 0

    def counted(self: Span, start: int, stop: int) -> None:
        nonlocal made
        made += 1
        assert made < 10 * replicas, "a span for each part"
        vars(self).update(start=start, stop=stop)

    monkeypatch.setattr(Span, "__init__", counted)
    round_cost.cache_clear()
    large = round_cost(numel=10**14, codec="fp32", replicas=replicas, mode=plan)
    payload, others = 4 * 10**14, replicas - 1
    parts = -(-(10**14) // LARGEST_BLOCK)  # a block of fp32 is larger than a part
    down, gets = {
        "gather": (others * payload, others * parts),
        "sharded": (2 * others * payload // replicas, 2 * others * parts // replicas),
        "syncer": (payload, parts),
    }[plan]
    assert large.down == pytest.approx(down, rel=1e-5)
    assert large.gets == pytest.approx(gets, rel=1e-5)


def test_the_largest_shard_is_the_first() -> None:
    for numel in (1, 2**16, 2**16 + 1, 5_000_003, 10**10):
        for shards in (1, 2, 7, 128, 4096):
            assert largest_shard(numel, shards) == shard_spans(numel, shards)[0]


def test_part_count_equals_the_number_of_part_spans() -> None:
    for numel in (1, 2**16, 2**16 + 1, 5_000_003, 10**10):
        block = block_elements(numel)
        for size in (block * 4, block, block // 2, 1):
            for span in [Span(0, numel), *shard_spans(numel, 7)]:
                cut = part_spans(span, block=block, block_bytes=size)
                assert part_count(span, block=block, block_bytes=size) == len(cut)
