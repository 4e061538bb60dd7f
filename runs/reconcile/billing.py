"""Estimates the cost of attempts and of the run.

An attempt is billed from the start of its job as reported by the backend (otherwise from the
launch) to its end, or for the seconds that the backend reports as billed, at the pool's price at
launch. A job that ended while it waited for a machine costs nothing, and neither does time in which
a cluster queue suspended a running job. These are estimates; the backend issues the bill. The cost
of an attempt without a known price is unknown and missing from the run's total.

The total includes an estimate for traffic and requests: bytes and requests that replicas report,
times the prices that an administrator set for the kind of bucket, or 0 without them.
"""

from __future__ import annotations

from datetime import datetime

from django.db.models import Q, Sum

from executors.base import JobState
from runs.backends import price_settings
from runs.bulk import update_row
from runs.models import EvaluationAttempt, ReplicaAttempt, Run, money
from runs.reconcile.context import ReconcileContext

TRAFFIC_STEP_USD = 0.001
"""Smallest change of the estimate for traffic that is written."""
WRITE_EVERY_S = 10.0
"""Seconds of cost that the rows of running jobs can lag behind."""


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
    """The cost of an attempt; None if the price is unknown.

    It is 0 for an attempt that ended and never ran: neither its backend nor a heartbeat reported a
    start (see :func:`runs.reconcile.jobs.mark_started`). ``earlier_usd`` is the cost before the job
    was suspended; ``billed_s`` includes that time.
    """
    if price_usd_h is None:
        return None
    if billed_s is not None:
        return money.bounded_usd(billed_s * price_usd_h / 3600.0)
    began = started_at or (launched_at if ended_at is None else None)
    if began is None:
        return earlier_usd
    seconds = ((ended_at or now) - began).total_seconds()
    return money.bounded_usd(earlier_usd + max(seconds, 0.0) * price_usd_h / 3600.0)


def suspend(attempt: ReplicaAttempt) -> None:
    """Keep the cost so far of a job that ran and is back in a queue."""
    if attempt.started_at is None:
        return
    cost = attempt.cost_usd or 0.0
    update_row(attempt, Q(ended_at=None), started_at=None, earlier_cost_usd=cost)


def add_up(context: ReconcileContext) -> None:
    """Update the costs of this tick's attempts and the run's total."""
    changed = [attempt for attempt in context.attempts if _update_cost(attempt, context)]
    run = context.run
    has_moved = abs(traffic_usd(run) - run.traffic_usd) >= TRAFFIC_STEP_USD
    if not changed and not has_moved:
        return
    if changed:
        ReplicaAttempt.objects.bulk_update(changed, ["cost_usd"])
    context.changes.run |= update_total(run)


def update_total(run: Run) -> bool:
    """Update the cost of the run: attempts of replicas and of evaluations, and traffic. False if it
    is the same."""
    traffic = traffic_usd(run)
    total = traffic + attempts_usd(run)
    if run.cost_usd == total and run.traffic_usd == traffic:
        return False
    return update_row(run, cost_usd=total, traffic_usd=traffic)


def attempts_usd(run: Run) -> float:
    """The cost of all attempts of replicas and of evaluations, as far as it is known."""
    parts = (
        ReplicaAttempt.objects.filter(replica__run=run),
        EvaluationAttempt.objects.filter(evaluation__run=run),
    )
    return sum(part.aggregate(sum=Sum("cost_usd"))["sum"] or 0.0 for part in parts)


def traffic_usd(run: Run) -> float:
    """The estimate for the traffic and the requests of the run's replicas; 0 without prices."""
    prices = price_settings.traffic_prices().get(run.rendezvous.partition("://")[0])
    if prices is None:
        return 0.0
    return money.bounded_usd(
        prices.cost_usd(up=run.bytes_up, down=run.bytes_down, requests=run.requests)
    )


def _update_cost(attempt: ReplicaAttempt, context: ReconcileContext) -> bool:
    """Set the attempt's cost; return whether the change is large enough to write."""
    job = context.jobs.get(attempt.replica_id)
    if job is not None and job.state == JobState.PENDING:
        return False
    if job is not None and job.state == JobState.UNKNOWN and attempt.started_at is None:
        return False  # it can still be waiting for a machine
    cost = cost_usd(
        price_usd_h=attempt.price_usd_h,
        launched_at=attempt.launched_at,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        now=context.now,
        billed_s=attempt.billed_s,
        earlier_usd=attempt.earlier_cost_usd,
    )
    if cost is None or attempt.price_usd_h is None or cost == attempt.cost_usd:
        return False
    is_small = abs(cost - (attempt.cost_usd or 0.0)) < attempt.price_usd_h * WRITE_EVERY_S / 3600.0
    if attempt.cost_usd is not None and is_small and attempt.ended_at is None:
        return False
    attempt.cost_usd = cost
    return True
