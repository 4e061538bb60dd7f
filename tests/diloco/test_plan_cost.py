"""The cost model: what it counts is what a round really moves, and it picks the least."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.plan_traffic import CODECS, differences, one_round, small_cuts
from diloco.rendezvous.plan_cost import cheapest_plan, round_cost

NUMEL = 50_003
"""Thirteen blocks of 4,096 elements: unequal shards, and a last block of 851."""


@pytest.mark.parametrize("replicas", [2, 3, 4, 5])
@pytest.mark.parametrize("plan", ["gather", "sharded", "syncer"])
def test_a_round_moves_exactly_what_the_formulas_say(
    tmp_path: Path, plan: str, replicas: int
) -> None:
    torch.set_num_threads(1)
    codec = CODECS[replicas - 1]  # bf16, int8, e3m0, topk
    with small_cuts(part_bytes=16_384):
        for name in ("fp32", codec):
            case = {"replicas": replicas, "plan": plan, "codec": name, "numel": NUMEL}
            assert differences(one_round(tmp_path / name, **case), **case) == []


@pytest.mark.parametrize("plan", ["gather", "sharded", "syncer"])
def test_a_round_of_less_than_a_block_leaves_shards_empty(tmp_path: Path, plan: str) -> None:
    case = {"replicas": 3, "plan": plan, "codec": "fp32", "numel": 10}
    assert differences(one_round(tmp_path, **case), **case) == []


@pytest.mark.parametrize("replicas", [2, 4, 16])
def test_the_bytes_are_those_of_the_protocol(replicas: int) -> None:
    """Without headers: gather (N - 1) Sc; sharded (N - 1)(Sc + Sr) / N; syncer Sr."""
    numel = 2**16 * 16 * 15  # shards of equal length
    for codec, size, reduced in (("fp32", 4, 4), ("bf16", 2, 2), ("int8", 260 / 256, 4)):
        sc, sr = size * numel, reduced * numel
        down = {
            mode: round_cost(numel=numel, codec=codec, replicas=replicas, mode=mode).down
            for mode in ("gather", "sharded", "syncer")
        }
        assert down["gather"] == (replicas - 1) * sc
        assert down["sharded"] == (replicas - 1) * (sc + sr) / replicas
        assert down["syncer"] == sr


def test_auto_gathers_what_is_small_and_shards_what_is_large() -> None:
    few, many = 10_000, 100_000_000
    assert cheapest_plan(numel=few, codec="fp32", replicas=4, syncer=False) == "gather"
    assert cheapest_plan(numel=many, codec="fp32", replicas=8, syncer=False) == "sharded"
    assert cheapest_plan(numel=many, codec="fp32", replicas=4, syncer=True) == "syncer"
