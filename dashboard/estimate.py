"""What a draft will move, train and cost, before it is launched: the form asks for it as JSON and
only shows it. The bytes are :mod:`diloco.rendezvous.plan_cost`'s, with every replica in every
round; money is :mod:`runs.forecast`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dashboard import formats
from diloco.rendezvous.cost import ring_all_reduce
from diloco.rendezvous.simulation import rounds_of
from diloco.rendezvous.traffic import mode_of, round_traffic
from runs.forecast import Forecast, forecast, tokens_per_step
from runs.presets import RunDraft


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes up and down are of the replica that moves most. ``reduction``: bytes a ring all-reduce
    of fp32 gradients at every step would move, over the bytes this run moves; None with one
    replica, where nothing needs to move. Money is None where a price is not known; ``pool_usd_h``
    is of each pool, in order.

    Of somebody's own code nobody knows how large its model and its batches are: then what follows
    from them is None.
    """

    parameters: int | None
    reduce_plan: str
    up_bytes_per_round: int | None
    down_bytes_per_round: int | None
    total_bytes: int | None
    rounds: int
    steps: int
    tokens: int | None
    tokens_per_round: int | None
    reduction: float | None
    replicas: int
    pool_usd_h: tuple[float | None, ...]
    usd_h: float | None
    usd: float | None
    usd_text: str
    effective_json: str


def estimate(draft: RunDraft, rates: Mapping[tuple[str, str], float] | None = None) -> Estimate:
    """``rates`` are :func:`runs.rates.known_rates` of the workload."""
    settings = draft.settings
    per_step = tokens_per_step(draft)
    rounds = rounds_of(settings, per_step or 0)
    per_round = None
    if per_step is not None:
        per_round = settings.round_steps * per_step * settings.num_replicas
    money = forecast(draft, rates or {})
    return Estimate(
        **_moved(draft, rounds),
        rounds=rounds,
        steps=rounds * settings.round_steps,
        tokens=None if per_round is None else rounds * per_round,
        tokens_per_round=per_round,
        replicas=settings.num_replicas,
        pool_usd_h=money.pool_usd_h,
        usd_h=money.usd_h,
        usd=money.usd,
        usd_text=usd_text(money),
        effective_json=json.dumps(_effective(draft), indent=2),
    )


def _moved(draft: RunDraft, rounds: int) -> dict[str, Any]:
    """What goes through the bucket, by how many parameters the model has."""
    settings, replicas = draft.settings, draft.settings.num_replicas
    shape = getattr(draft.workload, "shape", None)
    if shape is None:
        unknown = (
            "parameters", "up_bytes_per_round", "down_bytes_per_round", "total_bytes", "reduction",
        )  # fmt: skip
        return {**dict.fromkeys(unknown), "reduce_plan": settings.reduce_plan}
    parameters = shape.parameters
    traffic = round_traffic(settings, parameters, mode=mode_of(settings, parameters))
    per_round = traffic.up + traffic.down
    ring_per_step = replicas * ring_all_reduce(numel=parameters, replicas=replicas)
    return {
        "parameters": parameters,
        "reduce_plan": traffic.mode,
        "up_bytes_per_round": traffic.replica.up,
        "down_bytes_per_round": traffic.replica.down,
        "total_bytes": rounds * per_round,
        "reduction": ring_per_step * settings.round_steps / per_round if replicas > 1 else None,
    }


def _effective(draft: RunDraft) -> dict[str, Any]:
    return {
        "name": draft.name,
        "settings": draft.settings.to_dict(),
        "workload": draft.workload.to_dict(),
        "pools": [asdict(pool) for pool in draft.pools],
        "time_limit_s": draft.time_limit_s,
        "start_timeout_s": draft.start_timeout_s,
        "budget_usd": draft.budget_usd,
        "max_restarts": draft.max_restarts,
    }


def usd_text(money: Forecast) -> str:
    """What the run costs in all, and how that is known or why not."""
    if money.hours is None:
        return "unknown without a time limit: nobody has trained this model on this hardware yet"
    time = formats.duration(money.hours * 3600)
    if money.usd is None:
        return f"unknown in {time}: a price is missing"
    if money.hours_by == "time limit":
        return f"at most {formats.money(money.usd)} in {time}, the time limit"
    return f"about {formats.money(money.usd)} in {time}, at the pace of earlier runs"
