"""Estimates duration, traffic and cost of a draft before it runs.

Every replica is assumed to take part in every round and never to fail. The cost is the hourly price
of all replicas from the first minute to the last: start-up, relaunches and idle machines are not
distinguished, and hours are not rounded up as some backends do. Unknown is None, never 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.planner.prediction import PlanRequest, predict, rounds_of
from diloco.protocol.payload_size import ring_all_reduce
from diloco.protocol.settings import GroupSettings
from runs.submit.pool_check import pool_price
from runs.submit.run_draft import RunDraft

RatesByHardware = Mapping[tuple[str, str], float]
"""Tokens per second of one replica by (backend, hardware):
:func:`runs.submit.throughput_history.known_rates`."""


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """The estimate of a draft.

    ``up_bytes_per_round`` and ``down_bytes_per_round`` are those of the replica that moves most.
    ``exchange_s`` is one round's, with default bandwidth and latency
    (:data:`~diloco.protocol.reduce_cost.BANDWIDTH`, ``LATENCY_S``). ``reduction`` is the traffic of
    a ring all-reduce of fp32 gradients at every step, divided by this run's; None for one replica.
    ``goodput`` (compute over compute plus exposed exchange) and ``tokens_per_s`` use rates of
    earlier runs, which include their waiting, and are therefore slightly optimistic. For custom
    code the size of the model and of batches is unknown, and values that depend on them are None.

    ``pool_usd_h`` has a price per pool. ``round_s`` is that of the slowest pool, which all others
    wait for. ``hours_by`` is the source of ``hours``: ``rate``, ``time limit`` (it ends the run
    first, or there is no rate), or '' if unknown.
    """

    parameters: int | None = None
    reduce_plan: str
    up_bytes_per_round: int | None = None
    down_bytes_per_round: int | None = None
    total_bytes: int | None = None
    reduction: float | None = None
    exchange_s: float | None = None
    goodput: float | None = None
    rounds: int
    steps: int
    tokens: int | None
    tokens_per_round: int | None
    tokens_per_s: float | None
    replicas: int
    pool_usd_h: tuple[float | None, ...]
    usd_h: float | None
    round_s: float | None
    hours: float | None
    hours_by: str
    usd: float | None


def estimate_run(draft: RunDraft, rates: RatesByHardware) -> RunEstimate:
    """Estimate a draft from the ``rates`` of earlier runs of its workload."""
    settings, per_step = draft.settings, tokens_per_step(draft)
    rounds = rounds_of(settings, per_step or 0)
    per_round = None
    if per_step is not None:
        per_round = settings.round_steps * per_step * settings.num_replicas
    round_s = slowest_round_s(draft, rates)
    hours, hours_by = _hours(draft, rounds, round_s)
    prices = tuple(_product(pool_price(pool), pool.count) for pool in draft.pools)
    known = [price for price in prices if price is not None]
    usd_h = sum(known) if len(known) == len(prices) else None
    estimate = RunEstimate(
        reduce_plan=settings.reduce_plan,
        rounds=rounds,
        steps=rounds * settings.round_steps,
        tokens=None if per_round is None else rounds * per_round,
        tokens_per_round=per_round,
        tokens_per_s=per_round / round_s if per_round and round_s else None,
        replicas=settings.num_replicas,
        pool_usd_h=prices,
        usd_h=usd_h,
        round_s=round_s,
        hours=hours,
        hours_by=hours_by,
        usd=_product(usd_h, hours),
    )
    shape = getattr(draft.workload, "shape", None)
    return estimate if shape is None else _with_traffic(estimate, settings, shape.parameters)


def _with_traffic(estimate: RunEstimate, settings: GroupSettings, parameters: int) -> RunEstimate:
    """Add the values that depend on the size of the model."""
    round_s = estimate.round_s  # without it, no value that depends on the step time is used
    plan = predict(
        PlanRequest(
            settings=settings,
            parameters=parameters,
            step_s=(round_s or 1.0) / settings.round_steps,
        )
    )
    traffic, replicas = plan.traffic, estimate.replicas
    per_round = traffic.up + traffic.down
    ring = replicas * ring_all_reduce(numel=parameters, replicas=replicas)
    return dataclasses.replace(
        estimate,
        parameters=parameters,
        reduce_plan=traffic.mode,
        up_bytes_per_round=traffic.replica.up,
        down_bytes_per_round=traffic.replica.down,
        total_bytes=estimate.rounds * per_round,
        reduction=ring * settings.round_steps / per_round if replicas > 1 else None,
        exchange_s=plan.exchange_s,
        goodput=None if round_s is None else plan.utilisation,
    )


def slowest_round_s(draft: RunDraft, rates: RatesByHardware) -> float | None:
    """Compute time of one round; None unless every pool's rate is known."""
    by_pool = [rates.get((pool.backend, pool.hardware)) for pool in draft.pools]
    known = [rate for rate in by_pool if rate]
    tokens = tokens_per_step(draft)
    if tokens is None or len(known) < len(by_pool):
        return None
    return draft.settings.round_steps * tokens / min(known)


def tokens_per_step(draft: RunDraft) -> int | None:
    """Tokens of one replica's step; None for a workload without a known sequence length."""
    shape: Any = getattr(draft.workload, "shape", draft.workload)
    context = getattr(shape, "context", None)
    return None if context is None else draft.settings.batch_size * int(context)


def _hours(draft: RunDraft, rounds: int, round_s: float | None) -> tuple[float | None, str]:
    limit_h = draft.time_limit_s / 3600 if draft.time_limit_s else None
    if round_s is None:
        return limit_h, "time limit" if limit_h else ""
    hours = rounds * round_s / 3600
    if limit_h is not None and limit_h < hours:
        return limit_h, "time limit"
    return hours, "rate"


def _product(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor
