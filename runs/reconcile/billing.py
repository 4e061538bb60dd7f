"""Money: what each attempt has cost so far, and the run.

From when the backend says that the job began to run (or, where it does not say, from the launch)
to its end, or the seconds that the backend says it bills, at the price the pool had when the
attempt was launched. What was ended while it waited for a machine costs nothing, and neither does
the time in which the queue of a cluster has suspended a job that ran before. An estimate: the
bill is the backend's. An attempt of a pool without a known price costs nobody knows what, and the
run's sum leaves it out.
"""

from __future__ import annotations

from datetime import datetime

from django.db.models import Sum

from executors.base import JobState
from runs.models import ReplicaAttempt, Run
from runs.reconcile.context import Tick

WRITE_EVERY_S = 10.0
"""Seconds of cost that may be missing from the rows of running jobs."""


def cost_usd(
    *,
    price_usd_h: float | None,
    launched_at: datetime | None,
    started_at: datetime | None,
    ended_at: datetime | None,
    now: datetime,
    billed_s: float | None = None,
    earlier_usd: float = 0.0,
) -> float | None:
    """None where the price is not known; 0 for what never ran: it has ended, and neither its
    backend nor a beat ever said that it had begun (see :func:`runs.reconcile.jobs.has_worked`).
    ``earlier_usd``: what it cost before it was suspended; ``billed_s`` includes it."""
    if price_usd_h is None:
        return None
    if billed_s is not None:
        return billed_s * price_usd_h / 3600.0
    began = started_at or (launched_at if ended_at is None else None)
    if began is None:
        return earlier_usd
    seconds = ((ended_at or now) - began).total_seconds()
    return earlier_usd + max(seconds, 0.0) * price_usd_h / 3600.0


def suspend(attempt: ReplicaAttempt) -> None:
    """Keep what the attempt has cost: its job ran, and waits in a queue again."""
    if attempt.started_at is None:
        return
    cost = attempt.cost_usd or 0.0
    suspended = ReplicaAttempt.objects.filter(pk=attempt.pk, ended_at=None)
    if suspended.update(started_at=None, earlier_cost_usd=cost):
        attempt.started_at, attempt.earlier_cost_usd = None, cost


def add_up(tick: Tick) -> None:
    """Bring the costs of this tick's attempts, and the run's sum, up to date."""
    changed = [attempt for attempt in tick.attempts if _moved(attempt, tick)]
    if not changed:
        return
    ReplicaAttempt.objects.bulk_update(changed, ["cost_usd"])
    run = tick.run
    total = ReplicaAttempt.objects.filter(replica__run=run).aggregate(sum=Sum("cost_usd"))["sum"]
    if run.cost_usd != (total or 0.0):
        Run.objects.filter(pk=run.pk).update(cost_usd=total or 0.0)
        run.cost_usd = total or 0.0
        tick.changes.run = True


def _moved(attempt: ReplicaAttempt, tick: Tick) -> bool:
    """Give the attempt its cost, if that is worth a write."""
    job = tick.jobs.get(attempt.replica_id)
    if job is not None and job.state == JobState.PENDING:
        return False
    if job is not None and job.state == JobState.UNKNOWN and attempt.started_at is None:
        return False  # it may be waiting for a machine still
    cost = cost_usd(
        price_usd_h=attempt.price_usd_h,
        launched_at=attempt.launched_at,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        now=tick.now,
        billed_s=attempt.billed_s,
        earlier_usd=attempt.earlier_cost_usd,
    )
    if cost is None or attempt.price_usd_h is None or cost == attempt.cost_usd:
        return False
    small = abs(cost - (attempt.cost_usd or 0.0)) < attempt.price_usd_h * WRITE_EVERY_S / 3600.0
    if attempt.cost_usd is not None and small and attempt.ended_at is None:
        return False
    attempt.cost_usd = cost
    return True
