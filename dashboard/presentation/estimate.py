"""The estimate of a draft with texts for form and API; :mod:`runs.submit.forecast` computes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from dashboard.presentation import formats
from runs.submit.forecast import RunEstimate, estimate_run
from runs.submit.run_draft import RunDraft


@dataclass(frozen=True, kw_only=True)
class EstimateView(RunEstimate):
    """An estimate with the texts that form and API show."""

    usd_text: str
    effective_json: str


def estimate(draft: RunDraft, rates: Mapping[tuple[str, str], float] | None = None) -> EstimateView:
    """``rates`` are :func:`runs.submit.throughput_history.known_rates` of the workload."""
    result = estimate_run(draft, rates or {})
    return EstimateView(
        **vars(result),
        usd_text=usd_text(result),
        effective_json=json.dumps(draft.to_dict(), indent=2),
    )


def usd_text(money: RunEstimate) -> str:
    """Return the total cost as text, with its basis or the reason why it is unknown."""
    if money.hours is None:
        return "unknown without a time limit: no earlier run of this model on this hardware"
    time = formats.duration(money.hours * 3600)
    if money.usd is None:
        return f"unknown in {time}: a price is missing"
    if money.hours_by == "time limit":
        return f"at most {formats.money(money.usd)} in {time}, the time limit"
    return f"about {formats.money(money.usd)} in {time}, at the speed of earlier runs"
