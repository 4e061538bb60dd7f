"""The planner: traffic, duration and cost of a group before it is launched, for its page and API.

Pure functions on the cost model of replicas and ``python -m diloco.simulate``
(:mod:`diloco.planner.prediction`). A run is as long as its tokens require, so different values of H
reach the same goal: work lost to failures is trained again and counted in rounds, bytes, time and
money. :mod:`runs.submit.forecast` estimates a draft, whose length follows from its settings.

The planner cannot predict the effect of H on the loss, nor what the cost model leaves out.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from diloco.planner.prediction import PlanEstimate, PlanRequest, bandwidth_for, predict
from diloco.protocol.payload_size import ring_all_reduce
from diloco.protocol.setting_spec import SettingsError
from diloco.protocol.settings import GroupSettings, setting_fields

MOST_ROUNDS = int(
    next(spec.maximum for spec in setting_fields() if spec.name == "total_rounds") or 0
)
LARGEST_H = int(next(spec.maximum for spec in setting_fields() if spec.name == "sync_every") or 0)
SWEEP_POINTS = 60
FEWEST_ROUNDS = 10
"""Fewest rounds at the largest H of a sweep: with fewer, the length of the last one dominates."""
ENOUGH = 0.95
"""Utilisation for which the planner shows the required bandwidth."""

_FIXED: dict[str, Any] = {"warmup_steps": 0, "max_replicas": 99_999}
"""Settings without effect on the estimate, whose defaults could invalidate a short plan."""


@dataclass(frozen=True, kw_only=True)
class PlannerInputs:
    """The inputs of the planner's page and API: a group, its machines and their network.

    ``step_s`` and ``tokens_per_step`` are for one inner step of one replica, ``tokens`` for all
    replicas over the whole run. ``mbit_s`` is one replica's bandwidth in each direction. ``mtbf_h``
    None: replicas never fail; ``replace_s`` is the time from a failure to the successor's start.
    ``usd_h`` is the price of one replica, None if unknown.
    """

    parameters: int
    num_replicas: int = 4
    sync_every: int = 50
    codec: str = "fp32"
    mean_codec: str = "full"
    num_fragments: int = 1
    overlap_steps: int = 0
    reduce_plan: str = "auto"
    min_quorum: int = 1
    step_s: float = 1.0
    tokens_per_step: int = 8192
    tokens: int = 1_000_000_000
    mbit_s: float = 800.0
    latency_s: float = 0.1
    mtbf_h: float | None = None
    replace_s: float = 120.0
    usd_h: float | None = None
    egress_usd_gb: float = 0.09

    @property
    def steps(self) -> int:
        """Inner steps of each replica if no work is lost."""
        return max(1, -(-self.tokens // (self.tokens_per_step * self.num_replicas)))


@dataclass(frozen=True, kw_only=True)
class PlanPoint:
    """The estimate for one value of H, as page and API show it.

    ``up_bytes`` and ``down_bytes`` are those of one round for the replica that moves most;
    ``total_bytes`` covers all replicas and the whole run. ``exchange_s`` is the duration of a
    round's exchange, ``exposed_s`` the part that overlap does not hide. ``efficiency`` is
    utilisation times goodput. ``reduction`` is the traffic of a ring all-reduce of fp32 gradients
    at every step, divided by this traffic.

    None: the run never ends, a price is unknown, or there is no comparison.
    """

    sync_every: int
    reduce_plan: str
    rounds: int | None
    up_bytes: int
    down_bytes: int
    round_bytes: int
    total_bytes: float | None
    reduction: float | None
    compute_s: float
    exchange_s: float
    exposed_s: float
    utilisation: float
    goodput: float
    efficiency: float
    failures: float | None
    wall_s: float | None
    tokens_per_s: float | None
    hardware_usd: float | None
    bucket_usd: float | None
    usd: float | None
    usd_per_billion_tokens: float | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sweep over H.

    ``chosen`` is the point for the requested H and ``curve`` the sweep in increasing order.
    ``best`` is the H with the highest efficiency. ``enough_mbit_s`` is the bandwidth at which
    utilisation reaches :data:`ENOUGH`, None if latency alone prevents it.
    """

    chosen: PlanPoint
    curve: tuple[PlanPoint, ...]
    best: int
    enough_mbit_s: float | None


def plan(inputs: PlannerInputs) -> Plan:
    """Estimate the requested H and a sweep. Raises :class:`SettingsError` with the wrong field."""
    chosen = point_for(inputs)
    curve = tuple(
        chosen if h == inputs.sync_every else point_for(dataclasses.replace(inputs, sync_every=h))
        for h in sweep(inputs)
    )
    needed = bandwidth_for(_request(inputs, rounds=1), ENOUGH) * 8 / 1e6
    return Plan(
        chosen=chosen,
        curve=curve,
        best=max(curve, key=lambda point: point.efficiency).sync_every,
        enough_mbit_s=needed if math.isfinite(needed) else None,
    )


def sweep(inputs: PlannerInputs) -> list[int]:
    """Values of H, evenly spaced on a logarithmic scale: multiples of the number of fragments,
    larger than the overlap, small enough for some rounds. The requested H is one of them."""
    fragments = inputs.num_fragments
    least = max(1, inputs.overlap_steps // fragments + 1)
    longest = max(inputs.sync_every, min(LARGEST_H, inputs.steps // FEWEST_ROUNDS))
    most = max(least, longest // fragments)
    ratio = (most / least) ** (1 / (SWEEP_POINTS - 1))
    values = {round(least * ratio**i) * fragments for i in range(SWEEP_POINTS)}
    return sorted({h for h in values if h <= LARGEST_H} | {inputs.sync_every})


def point_for(inputs: PlannerInputs) -> PlanPoint:
    """Estimate the requested H. Raises :class:`SettingsError` with the wrong field."""
    if inputs.tokens_per_step < 1 or inputs.tokens < 1:
        field = "tokens" if inputs.tokens < 1 else "tokens_per_step"
        raise SettingsError(field, f"expected 1 or more, found {getattr(inputs, field):,}")
    once = predict(_request(inputs, rounds=1))
    availability = once.outlook
    per_round = inputs.sync_every // inputs.num_fragments * inputs.tokens_per_step
    per_round *= inputs.num_replicas
    kept = availability.live_share * availability.kept_share
    needed = math.ceil(inputs.tokens / (per_round * kept)) if kept else MOST_ROUNDS + 1
    if needed > MOST_ROUNDS or not math.isfinite(availability.slowdown):
        return _point(inputs, once, None)
    return _point(inputs, predict(_request(inputs, rounds=needed)), needed)


def _request(inputs: PlannerInputs, *, rounds: int) -> PlanRequest:
    names = {field.name for field in dataclasses.fields(PlannerInputs)}
    settings = {
        spec.name: getattr(inputs, spec.name) for spec in setting_fields() if spec.name in names
    }
    return PlanRequest(
        settings=GroupSettings(**(_FIXED | settings), total_rounds=rounds),
        parameters=inputs.parameters,
        step_s=inputs.step_s,
        tokens_per_step=inputs.tokens_per_step,
        up_bytes_per_s=inputs.mbit_s * 1e6 / 8,
        down_bytes_per_s=inputs.mbit_s * 1e6 / 8,
        latency_s=inputs.latency_s,
        mtbf_s=math.inf if inputs.mtbf_h is None else inputs.mtbf_h * 3600,
        replace_s=inputs.replace_s,
        egress_per_gb=inputs.egress_usd_gb,
        replica_per_hour=inputs.usd_h or 0.0,
    )


def _point(inputs: PlannerInputs, estimate: PlanEstimate, rounds: int | None) -> PlanPoint:
    """With ``rounds`` None the run never ends, and totals are None."""
    traffic, replicas = estimate.traffic, inputs.num_replicas
    round_bytes = traffic.up + traffic.down
    ring = replicas * ring_all_reduce(numel=inputs.parameters, replicas=replicas)
    steps = inputs.sync_every // inputs.num_fragments
    bucket = estimate.cost.egress + estimate.cost.requests
    usd = None if inputs.usd_h is None else estimate.cost.hardware + bucket
    ends = rounds is not None
    return PlanPoint(
        sync_every=inputs.sync_every,
        reduce_plan=traffic.mode,
        rounds=rounds,
        up_bytes=traffic.replica.up,
        down_bytes=traffic.replica.down,
        round_bytes=round_bytes,
        total_bytes=estimate.up + estimate.down if ends else None,
        reduction=ring * steps / round_bytes if replicas > 1 else None,
        compute_s=estimate.compute_s,
        exchange_s=estimate.exchange_s,
        exposed_s=estimate.exposed_s,
        utilisation=estimate.utilisation,
        goodput=estimate.outlook.goodput,
        efficiency=estimate.efficiency,
        failures=estimate.failures if ends else None,
        wall_s=estimate.wall_s if ends else None,
        tokens_per_s=estimate.tokens_per_s if ends else None,
        hardware_usd=estimate.cost.hardware if ends and inputs.usd_h is not None else None,
        bucket_usd=bucket if ends else None,
        usd=usd if ends else None,
        usd_per_billion_tokens=usd / estimate.tokens * 1e9 if ends and usd is not None else None,
    )
