"""Estimates the duration of rounds, from commit to commit.

The estimate must not depend on when a round was ingested; otherwise an import would give a
different one. It therefore uses commits only, never telemetry, which can arrive before or after
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from runs.models import Round, Run

_SMOOTHING = 0.3


@dataclass(frozen=True, kw_only=True)
class Before:
    """The previous commit."""

    at: datetime
    tokens: int


def commit_before(
    run: Run, number: int, at: datetime, resumed: Sequence[datetime]
) -> Before | None:
    """The commit before round ``number``. None for the first round, whose start is not recorded,
    and if the run was paused in between."""
    earlier = Round.objects.filter(run=run, number__lt=number, committed_at__isnull=False)
    last = earlier.order_by("-number").only("committed_at", "tokens_total").first()
    if last is None or last.committed_at is None:
        return None
    return unless_resumed(Before(at=last.committed_at, tokens=last.tokens_total), at, resumed)


def unless_resumed(last: Before | None, at: datetime, resumed: Sequence[datetime]) -> Before | None:
    """The commit ``last``; None if the run was resumed between it and ``at``."""
    if last is None or any(last.at < resumed_at <= at for resumed_at in resumed):
        return None
    return last


def smoothed(round_s: float | None, before: Before | None, at: datetime) -> float | None:
    """Smoothed seconds per round, by the writers' clocks. For estimates only."""
    if before is None:
        return round_s
    took_s = max((at - before.at).total_seconds(), 0.0)
    return took_s if round_s is None else (1 - _SMOOTHING) * round_s + _SMOOTHING * took_s
