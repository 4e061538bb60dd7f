"""How long rounds take, from commit to commit.

What is said of a round must not hang on when it was read, or an import would say something else: so
nothing here is of the telemetry, which may come before or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from runs.models import Round, Run

_SMOOTHING = 0.3


@dataclass(frozen=True, kw_only=True)
class Before:
    """The commit before."""

    at: datetime
    tokens: int


def commit_before(
    run: Run, number: int, at: datetime, resumed: Sequence[datetime]
) -> Before | None:
    """What round ``number`` followed at once. None for the first, whose beginning no record tells,
    and where the run stood still in between: from commit to commit would be no pace."""
    found = Round.objects.filter(run=run, number__lt=number, committed_at__isnull=False)
    last = found.order_by("-number").only("committed_at", "tokens_total").first()
    if last is None or last.committed_at is None:
        return None
    if any(last.committed_at < then <= at for then in resumed):
        return None
    return Before(at=last.committed_at, tokens=last.tokens_total)


def smoothed(round_s: float | None, before: Before | None, at: datetime) -> float | None:
    """Seconds per round, by the committers' clocks: for an estimate only."""
    if before is None:
        return round_s
    took_s = max((at - before.at).total_seconds(), 0.0)
    return took_s if round_s is None else (1 - _SMOOTHING) * round_s + _SMOOTHING * took_s
