"""The formulas of the estimate, worked by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dashboard.estimate import estimate
from diloco.rendezvous.settings import GroupSettings
from diloco.rendezvous.workload import GPT_SIZES, ByteGPTWorkload
from runs.presets import PoolDraft, RunDraft


def draft(*, size: str = "mini", **changes: Any) -> RunDraft:
    settings = GroupSettings(
        **{"num_replicas": 4, "sync_every": 50, "batch_size": 8, "total_rounds": 20} | changes
    )
    return RunDraft(
        name="x",
        settings=settings,
        workload=ByteGPTWorkload(size=size),
        pools=(PoolDraft(count=settings.num_replicas),),
    )


def test_bytes_of_a_round() -> None:
    found = estimate(draft())
    payload = GPT_SIZES["mini"].parameters * 4
    assert found.up_bytes_per_round == payload
    assert found.down_bytes_per_round == 3 * payload
    assert found.total_bytes == 20 * 4 * (payload + 3 * payload)


def test_bf16_halves_them() -> None:
    assert estimate(draft(codec="bf16")).payload_bytes * 2 == estimate(draft()).payload_bytes


def test_tokens() -> None:
    found = estimate(draft())
    assert found.tokens_per_round == 50 * 8 * 256 * 4
    assert found.tokens == 20 * found.tokens_per_round
    assert found.steps == 20 * 50


def test_a_token_limit_ends_with_the_round_that_reaches_it() -> None:
    per_round = estimate(draft()).tokens_per_round
    assert estimate(draft(max_tokens=3 * per_round)).rounds == 3
    assert estimate(draft(max_tokens=3 * per_round + 1)).rounds == 4
    assert estimate(draft(max_tokens=10**15)).rounds == 20


def test_reduction_against_an_all_reduce_of_every_step() -> None:
    # Ring, 4 replicas: 2 * 3/4 of the gradient up and as much down = 3 P, 50 times; here 4 P once.
    assert estimate(draft()).reduction == pytest.approx(50 * 3 / 4)
    assert estimate(draft(num_replicas=1)).reduction is None


def test_the_effective_json_is_what_was_asked_for() -> None:
    wanted = draft()
    body = json.loads(estimate(wanted).effective_json)
    assert body["settings"] == wanted.settings.to_dict()
    assert body["pools"] == [dataclasses.asdict(pool) for pool in wanted.pools]
