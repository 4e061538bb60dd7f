"""What a draft will do, in words for form and API; the numbers are those of
:mod:`runs.submit.planner`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dashboard.presentation import formats
from runs.submit.forecast import Forecast
from runs.submit.planner import Outline, outline
from runs.submit.run_draft import RunDraft


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The fields of :class:`~runs.submit.planner.Outline`, and of its money. ``reduction``: bytes a
    ring all-reduce of fp32 gradients at every step would move, over the bytes this run moves; None
    with one replica, where nothing needs to move. Money is None where a price is not known;
    ``pool_usd_h`` is of each pool, in order."""

    parameters: int | None
    reduce_plan: str
    up_bytes_per_round: int | None
    down_bytes_per_round: int | None
    total_bytes: int | None
    rounds: int
    steps: int
    tokens: int | None
    tokens_per_round: int | None
    tokens_per_s: float | None
    reduction: float | None
    exchange_s: float | None
    goodput: float | None
    replicas: int
    pool_usd_h: tuple[float | None, ...]
    usd_h: float | None
    usd: float | None
    usd_text: str
    effective_json: str


def estimate(draft: RunDraft, rates: Mapping[tuple[str, str], float] | None = None) -> Estimate:
    """``rates`` are :func:`runs.submit.throughput_history.known_rates` of the workload."""
    found = outline(draft, rates or {})
    money = found.money
    told = {field.name: getattr(found, field.name) for field in fields(Outline)}
    del told["money"]
    return Estimate(
        **told,
        pool_usd_h=money.pool_usd_h,
        usd_h=money.usd_h,
        usd=money.usd,
        usd_text=usd_text(money),
        effective_json=json.dumps(_effective(draft), indent=2),
    )


def _effective(draft: RunDraft) -> dict[str, Any]:
    """All of it, as ``POST /api/runs`` takes it; a zip is named by the workload."""
    body = {field.name: getattr(draft, field.name) for field in fields(draft)}
    del body["archive"]
    return body | {
        "settings": draft.settings.to_dict(),
        "workload": draft.workload.to_dict(),
        "pools": [asdict(pool) for pool in draft.pools],
        "fork": draft.fork and asdict(draft.fork) | {"run": str(draft.fork.run)},
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
