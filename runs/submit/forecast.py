"""How long a draft will run and what that will cost, as far as anybody can know before it runs.

Money is the price of an hour of every replica, all of them at once from the first minute to the
last: start-up, relaunches and idle machines of one pool while another waits are not told apart. An
hour counts as long as it lasts, whatever a backend rounds it up to. Unknown is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.planner.prediction import rounds_of
from runs.submit.create import pool_price
from runs.submit.run_draft import RunDraft

ByPlace = Mapping[tuple[str, str], float]
"""(backend, hardware) -> tokens per second of one replica:
:func:`runs.submit.throughput_history.known_rates`."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """``round_s`` is by the slowest pool, whom the others wait for. ``hours_by`` says what the
    duration was taken from: ``rate``, ``time limit`` (it ends the run first, or nothing else is
    known), or '' where it is not known."""

    pool_usd_h: tuple[float | None, ...]
    usd_h: float | None
    round_s: float | None
    hours: float | None
    hours_by: str
    usd: float | None


def forecast(draft: RunDraft, rates: ByPlace) -> Forecast:
    prices = tuple(_times(pool_price(pool), pool.count) for pool in draft.pools)
    known = [price for price in prices if price is not None]
    usd_h = sum(known) if len(known) == len(prices) else None
    round_s = slowest_round_s(draft, rates)
    hours, hours_by = _hours(draft, round_s)
    return Forecast(
        pool_usd_h=prices,
        usd_h=usd_h,
        round_s=round_s,
        hours=hours,
        hours_by=hours_by,
        usd=_times(usd_h, hours),
    )


def slowest_round_s(draft: RunDraft, rates: ByPlace) -> float | None:
    """Compute time of one round; None unless every pool's rate is known."""
    found = [rates.get((pool.backend, pool.hardware)) for pool in draft.pools]
    known = [rate for rate in found if rate]
    tokens = tokens_per_step(draft)
    if tokens is None or len(known) < len(found):
        return None
    return draft.settings.round_steps * tokens / min(known)


def tokens_per_step(draft: RunDraft) -> int | None:
    """Of one replica; None for a workload that does not say how long its sequences are."""
    shape: Any = getattr(draft.workload, "shape", draft.workload)
    context = getattr(shape, "context", None)
    return None if context is None else draft.settings.batch_size * int(context)


def _hours(draft: RunDraft, round_s: float | None) -> tuple[float | None, str]:
    limit_h = draft.time_limit_s / 3600 if draft.time_limit_s else None
    tokens = tokens_per_step(draft)
    if round_s is None or tokens is None:
        return limit_h, "time limit" if limit_h else ""
    hours = rounds_of(draft.settings, tokens) * round_s / 3600
    if limit_h is not None and limit_h < hours:
        return limit_h, "time limit"
    return hours, "rate"


def _times(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor
