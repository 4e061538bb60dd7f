"""Pools that cannot launch as they should, and orphaned jobs, of all runs.

Each function makes a constant number of queries and returns at most as many rows as asked for, and
whether there are more.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Count, Exists, F, Max, Min, OuterRef, Q

from archipelago import fleet_rows
from executors.base import PendingCause
from runs.backends.circuit_breaker import LONGEST
from runs.json_values import finite, iso, row_of
from runs.models import OrphanJob, Replica, ReplicaPool, Run
from runs.permissions import can_view
from runs.queries.fleet import breaker_row, pool_name
from runs.queries.live_jobs import JobFilter
from runs.states import REPLICA_ENDED, RUN_ACTIVE

MOST = 50
WAITS = tuple(
    str(cause)
    for cause in PendingCause
    if cause not in (PendingCause.STARTING, PendingCause.QUEUED)
)
"""Reasons to wait that are no part of a normal start."""


def troubled_pools(
    user: AbstractBaseUser | AnonymousUser, chosen: JobFilter, *, now: datetime, limit: int = MOST
) -> tuple[list[dict[str, Any]], bool]:
    """Rows of the pools of active runs that are blocked or wait, the worst first."""
    if not can_view(user):
        return [], False
    waiting = Replica.objects.filter(pool=OuterRef("pk"), pending_cause__in=WAITS).exclude(
        state__in=REPLICA_ENDED
    )
    is_open = Q(open_until__gt=now, open_until__lte=now + LONGEST)
    troubled = Q(requires_intervention=True) | Q(failures__gt=0) | ~Q(held="") | is_open
    pools = ReplicaPool.objects.filter(run__state__in=sorted(RUN_ACTIVE)).filter(
        troubled | Q(Exists(waiting))
    )
    if chosen.backend:
        pools = pools.filter(backend=chosen.backend)
    if chosen.owner:
        pools = pools.filter(run__owner__username=chosen.owner)
    found = list(
        pools.select_related("credential")
        .annotate(run_name=F("run__name"), owner=F("run__owner__username"))
        .order_by("-requires_intervention", "-failures", "-id")[: limit + 1]
    )
    shown = found[:limit]
    waits = _waits([pool.pk for pool in shown])
    return [_pool_row(pool, waits.get(pool.pk, {}), now) for pool in shown], len(found) > limit


def _waits(pools: list[int]) -> dict[int, dict[str, Any]]:
    """Waiting replicas of each pool: number, reasons, since when, and the newest explanation."""
    rows = (
        Replica.objects.filter(pool__in=pools, pending_cause__in=WAITS)
        .exclude(state__in=REPLICA_ENDED)
        .order_by()
        .values_list("pool_id", "pending_cause")
        .annotate(number=Count("id"), since=Min("pending_since"), why=Max("state_reason"))
    )
    result: dict[int, dict[str, Any]] = {}
    for pool, cause, number, since, why in rows:
        wait = result.setdefault(pool, {"waiting": 0, "pending": [], "since": None, "why": ""})
        wait["waiting"] += number
        wait["pending"].append(cause)
        wait["since"] = min((at for at in (wait["since"], since) if at), default=None)
        wait["why"] = wait["why"] or why
    return result


def _pool_row(pool: ReplicaPool, wait: dict[str, Any], now: datetime) -> dict[str, Any]:
    annotated: Any = pool  # the model lacks the annotations
    breaker = breaker_row(pool)
    message, open_until = breaker["last_error"], breaker["open_until"]
    if breaker["state"] == "healthy":
        message = wait.get("why") or pool.last_error
        open_until = iso(pool.open_until) if pool.open_until and pool.open_until > now else None
    return {
        "run": str(pool.run_id),
        "run_name": annotated.run_name,
        "owner": annotated.owner,
        "pool": pool.pk,
        "name": pool_name(pool),
        "backend": pool.backend,
        "hardware": pool.hardware,
        "region": pool.region,
        "state": "waiting" if breaker["state"] == "healthy" else breaker["state"],
        "message": message,
        "advice": breaker["advice"],
        "open_until": open_until,
        "waiting": wait.get("waiting", 0),
        "pending": sorted(wait.get("pending", [])),
        "since": iso(wait.get("since")),
    }


def orphan_rows(
    user: AbstractBaseUser | AnonymousUser, chosen: JobFilter, *, limit: int = MOST
) -> tuple[list[dict[str, Any]], bool]:
    """Rows of orphaned jobs that the reaper found more than once, the newest first.

    A job that was found once can be a launch whose result is not stored yet.
    """
    if not can_view(user) or chosen.state:
        return [], False
    jobs = OrphanJob.objects.filter(seen_at__gt=F("first_seen_at"))
    if chosen.backend:
        jobs = jobs.filter(backend=chosen.backend)
    if chosen.owner:
        jobs = jobs.filter(attempt__replica__run__owner__username=chosen.owner)
    found = list(jobs.select_related("attempt__replica")[: limit + 1])
    runs = [job.attempt.replica.run_id for job in found if job.attempt]
    names = dict(Run.objects.filter(pk__in=runs).values_list("pk", "name")) if runs else {}
    return [_orphan_row(job, names) for job in found[:limit]], len(found) > limit


def _orphan_row(job: OrphanJob, names: dict[Any, str]) -> dict[str, Any]:
    replica = job.attempt.replica if job.attempt else None
    price = finite(job.attempt.price_usd_h) if job.attempt else None
    hours = max((job.seen_at - job.billed_from).total_seconds(), 0.0) / 3600
    return row_of(
        fleet_rows.Orphan,
        job,
        run=str(replica.run_id) if replica else None,
        run_name=names.get(replica.run_id) if replica else None,
        replica=replica.number if replica else None,
        price_usd_h=price,
        cost_usd=None if price is None else price * hours,
    )
