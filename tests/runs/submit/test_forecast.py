"""Cost and duration of a draft, calculated by hand."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload
from runs.submit.forecast import estimate_run
from runs.submit.run_draft import PoolDraft, RunDraft

LOCAL, OTHER = PoolDraft(count=3, price_usd_h=0.5), PoolDraft(count=1, price_usd_h=2.0)
MODAL = PoolDraft(backend="modal", hardware="H100", count=1, price_usd_h=4.0)


def draft(*pools: PoolDraft, **changes: Any) -> RunDraft:
    count = sum(pool.count for pool in pools)
    # 50 steps of 8 sequences of 128 tokens: 51,200 tokens a round and replica.
    settings = GroupSettings(
        num_replicas=count, sync_every=50, total_rounds=20, batch_size=8, warmup_steps=0
    )
    workload = ByteGPTWorkload(size="demo")
    return RunDraft(name="x", settings=settings, workload=workload, pools=pools, **changes)


def test_an_hour_is_the_sum_over_the_pools() -> None:
    estimate = estimate_run(draft(LOCAL, OTHER), {})
    assert estimate.pool_usd_h == (1.5, 2.0)
    assert estimate.usd_h == 3.5


def test_one_unknown_price_makes_the_sum_unknown_and_never_less() -> None:
    unknown = PoolDraft(backend="kubernetes", hardware="gpu", count=2)
    estimate = estimate_run(draft(LOCAL, unknown, time_limit_s=3600), {})
    assert estimate.pool_usd_h == (1.5, None)
    assert estimate.usd_h is None
    assert estimate.usd is None


def test_the_catalogue_s_price_unless_the_pool_has_its_own() -> None:
    assert estimate_run(draft(PoolDraft(count=2)), {}).usd_h == 0.0  # this machine is free
    assert estimate_run(draft(PoolDraft(count=2, price_usd_h=0.25)), {}).usd_h == 0.5


def test_the_time_limit_is_used_without_a_rate() -> None:
    estimate = estimate_run(draft(LOCAL, time_limit_s=7200), {})
    assert (estimate.hours, estimate.hours_by, estimate.usd) == (2.0, "time limit", 3.0)


def test_without_limit_and_rate_the_total_is_unknown() -> None:
    estimate = estimate_run(draft(LOCAL), {})
    assert (estimate.hours, estimate.hours_by, estimate.usd, estimate.round_s) == (
        None,
        "",
        None,
        None,
    )


def test_by_the_rate_of_the_slowest_pool() -> None:
    rates = {("local", "cpu"): 5120.0, ("modal", "H100"): 51_200.0}
    estimate = estimate_run(draft(LOCAL, MODAL), rates)
    assert estimate.round_s == pytest.approx(10.0)
    assert estimate.hours == pytest.approx(200 / 3600)
    assert estimate.hours_by == "rate"
    assert estimate.usd == pytest.approx(5.5 * 200 / 3600)


def test_a_rate_that_is_missing_for_one_pool_is_missing() -> None:
    assert estimate_run(draft(LOCAL, MODAL), {("local", "cpu"): 5120.0}).round_s is None


@pytest.mark.parametrize(("limit_s", "by"), [(100, "time limit"), (1000, "rate")])
def test_the_earliest_limit_ends_the_run(limit_s: int, by: str) -> None:
    estimate = estimate_run(draft(LOCAL, time_limit_s=limit_s), {("local", "cpu"): 5120.0})
    assert estimate.hours_by == by
    assert estimate.hours == pytest.approx(min(limit_s, 200) / 3600)
