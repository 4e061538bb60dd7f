"""Money: what each attempt has cost so far, and the run.

From when the backend says that the job began to run (or, where it does not say, from the launch)
to its end, at the price the pool had when the run was submitted. An estimate: the bill is the
backend's. An attempt of a pool without a known price costs nobody knows what, and the run's sum
leaves it out.
"""

from __future__ import annotations

from datetime import datetime

from django.db.models import Sum

from executors.base import JobState
from runs.models import ReplicaAttempt, Run
from runs.tick import Tick

WRITE_EVERY_S = 10.0
"""Seconds of cost that may be missing from the rows of running jobs."""


def cost_usd(
    *,
    price_usd_h: float | None,
    launched_at: datetime | None,
    started_at: datetime | None,
    ended_at: datetime | None,
    now: datetime,
) -> float | None:
    """None where the price is not known; 0 for what never ran."""
    if price_usd_h is None:
        return None
    began = started_at or launched_at
    if began is None:
        return 0.0
    seconds = ((ended_at or now) - began).total_seconds()
    return max(seconds, 0.0) * price_usd_h / 3600.0


def add_up(tick: Tick) -> None:
    """Bring the costs of this tick's attempts, and the run's sum, up to date."""
    changed = False
    for attempt in tick.attempts:
        job = tick.jobs.get(attempt.replica_id)
        if job is not None and job.state == JobState.PENDING:
            continue
        changed |= _write(attempt, tick.now)
    if changed:
        _sum(tick.run)
        tick.changes.run = True


def _write(attempt: ReplicaAttempt, now: datetime) -> bool:
    cost = cost_usd(
        price_usd_h=attempt.price_usd_h,
        launched_at=attempt.launched_at,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        now=now,
    )
    if cost is None or attempt.price_usd_h is None:
        return False
    news = cost - (attempt.cost_usd or 0.0)
    small = news < attempt.price_usd_h * WRITE_EVERY_S / 3600.0
    if small and (attempt.ended_at is None or cost == attempt.cost_usd):
        return False
    ReplicaAttempt.objects.filter(pk=attempt.pk).update(cost_usd=cost)
    attempt.cost_usd = cost
    return True


def _sum(run: Run) -> None:
    total = ReplicaAttempt.objects.filter(replica__run=run).aggregate(sum=Sum("cost_usd"))["sum"]
    Run.objects.filter(pk=run.pk).update(cost_usd=total or 0.0)
    run.cost_usd = total or 0.0
