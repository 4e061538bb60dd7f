"""Rows of pools, replicas and attempts, shared by pages, API and live stream.

Each function makes a constant number of queries, whatever the number of replicas; a test counts
them. A cost is null if no price is known; ``cost_known`` is false if it is incomplete.
"""

from __future__ import annotations

from typing import Any

from django.db.models import Count, Exists, Max, OuterRef, Q, QuerySet, Sum
from django.utils import timezone

from archipelago import rows
from executors.registry import BACKENDS, ON_SERVER
from runs.backends.circuit_breaker import FAILURES, LONGEST
from runs.backends.executors import catalogue
from runs.json_values import finite, iso, mapping, row_of
from runs.metrics.system_series import NEWEST
from runs.models import Replica, ReplicaAttempt, ReplicaPool, Run
from runs.queries.replica_history import console_url
from runs.states import REPLICA_ENDED, REPLICA_LIVE, ReplicaState
from runs.times import is_due

AT_WORK = REPLICA_LIVE | {ReplicaState.SUSPECT}
"""States in which a replica has a process that uses resources."""


def replica_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of all replicas of a run, by number. Three queries."""
    replicas = Replica.objects.filter(run=run).select_related("pool").order_by("number")
    attempts = ReplicaAttempt.objects.filter(replica__run=run)
    jobs, ends = _attempts_by(attempts, "replica_id"), _newest_ends(attempts)
    return [_replica_row(r, jobs.get(r.pk, {}), ends.get(r.pk)) for r in replicas]


def replica_row(replica: Replica) -> dict[str, Any]:
    """The row of one replica, whose pool must be loaded. Two queries."""
    attempts = ReplicaAttempt.objects.filter(replica=replica)
    jobs, ends = _attempts_by(attempts, "replica_id"), _newest_ends(attempts)
    return _replica_row(replica, jobs.get(replica.pk, {}), ends.get(replica.pk))


def _replica_row(r: Replica, job: dict[str, Any], end: ReplicaAttempt | None) -> dict[str, Any]:
    return row_of(
        rows.Replica,
        r,
        pool=r.pool_id,
        backend=r.pool.backend,
        attempt=job.get("last", 0),
        last_cause=end.cause if end else "",
        last_ended_at=iso(end.ended_at) if end else None,
        deadline_at=iso(job.get("deadline_at")),
        cost_usd=_cost(job),
        cost_known=not job.get("unpriced", 0),
        beat_interval_s=r.beat_interval_s or None,
        **{name: finite(getattr(r, name)) if r.state in AT_WORK else None for name in NEWEST},
    )


def pool_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of all pools of a run. Three queries."""
    pools = ReplicaPool.objects.filter(run=run).select_related("credential").order_by("id")
    counts: dict[int, dict[str, Any]] = {
        row["pool_id"]: {**row}
        for row in Replica.objects.filter(run=run)
        .order_by()
        .values("pool_id")
        .annotate(
            live=Count("id", filter=Q(state__in=REPLICA_LIVE)),
            over=Count("id", filter=Q(state__in=REPLICA_ENDED)),
            all=Count("id"),
        )
    }
    jobs = _attempts_by(ReplicaAttempt.objects.filter(replica__run=run), "replica__pool_id")
    return [_pool_row(p, counts.get(p.pk, {}), jobs.get(p.pk, {})) for p in pools]


def _pool_row(pool: ReplicaPool, count: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    hardware = catalogue().get(pool.backend, pool.hardware)
    return row_of(
        rows.Pool,
        pool,
        name=pool_name(pool),
        hardware_label=hardware.label if hardware else pool.hardware,
        credential=pool.credential.name if pool.credential else None,
        wanted=pool.count,
        live=count.get("live", 0),
        ended=count.get("over", 0),
        replicas=count.get("all", 0),
        cost_usd=_cost(job),
        cost_known=not job.get("unpriced", 0),
        breaker=breaker_row(pool),
    )


def pool_name(pool: ReplicaPool) -> str:
    """As people call it: ``Modal H100``, ``CPU of this machine``."""
    if pool.backend in ON_SERVER:
        hardware = catalogue().get(pool.backend, pool.hardware)
        return hardware.label if hardware else f"Local {pool.hardware}"
    return f"{BACKENDS.get(pool.backend, pool.backend)} {pool.hardware}"


def breaker_row(pool: ReplicaPool) -> dict[str, Any]:
    """State of the circuit breaker of a pool.

    ``state`` is ``healthy``, ``failing`` (below the limit), ``open`` (until ``open_until``),
    ``half_open``, ``action_required``, ``price_limit`` or ``budget``. ``last_error`` is the message
    of the backend, ``advice`` describes the next step.
    """
    label = BACKENDS.get(pool.backend, pool.backend)
    state, advice = "healthy", ""
    if pool.requires_intervention:
        state = "action_required"
        own = "the server's environment"
        account = f"the credential {pool.credential}" if pool.credential else own
        advice = (
            f"Nothing is launched in this pool. Fix token, permission, quota or billing of the "
            f"account at {label} ({account}). Then an administrator presses Reset under Settings, "
            "Backends, or an operator restarts a replica of this pool."
        )
    elif pool.failures >= FAILURES:
        waits = not is_due(pool.open_until, LONGEST, timezone.now())
        state = "open" if waits else "half_open"
        advice = "Then one replica is launched. If it trains, launches resume."
        if not waits:
            advice = "One replica at a time is launched. Once one trains, launches resume."
    elif pool.failures:
        state, advice = "failing", "Launches are retried automatically."
    last_error = pool.last_error if state != "healthy" else ""
    if pool.held and state in ("healthy", "failing"):
        last_error = pool.held
        if pool.held_by == "budget":
            state = "budget"
            advice = "Running replicas continue. An administrator can raise it under Budgets."
        else:
            state = "price_limit"
            advice = (
                "Launches resume once the price is within the limit. You can raise the limit under "
                "Scale."
            )
    return {
        "state": state,
        "failures": pool.failures,
        "open_until": iso(pool.open_until) if state == "open" else None,
        "last_error": last_error,
        "advice": advice,
    }


def attempt_rows(replica: Replica) -> list[dict[str, Any]]:
    """Rows of all attempts of a replica, newest first. One query."""
    return [
        row_of(
            rows.Attempt,
            attempt,
            job=dict(mapping(mapping(attempt.handle).get("data"))),
            url=console_url(attempt.handle),
        )
        for attempt in replica.attempts.order_by("-number")
    ]


def _newest_ends(attempts: QuerySet[ReplicaAttempt]) -> dict[int, ReplicaAttempt]:
    """The newest ended attempt of each replica."""
    ended = attempts.filter(ended_at__isnull=False)
    later = ReplicaAttempt.objects.filter(
        replica=OuterRef("replica"), number__gt=OuterRef("number"), ended_at__isnull=False
    )
    newest = ended.filter(~Exists(later)).only("replica_id", "cause", "ended_at")
    return {attempt.replica_id: attempt for attempt in newest}


def _attempts_by(attempts: QuerySet[ReplicaAttempt], name: str) -> dict[int, dict[str, Any]]:
    """Totals of attempts, grouped by the column ``name``."""
    totals = (
        attempts.order_by()
        .values(name)
        .annotate(
            last=Max("number"),
            cost=Sum("cost_usd"),
            unpriced=Count("id", filter=Q(price_usd_h=None, launched_at__isnull=False)),
            deadline_at=Max("deadline_at", filter=Q(ended_at=None)),
        )
    )
    return {row[name]: row for row in totals}


def _cost(job: dict[str, Any]) -> float | None:
    """Null if no price is known; 0 if nothing was launched."""
    cost = job.get("cost")
    if cost is not None:
        return finite(float(cost))
    return None if job.get("unpriced", 0) else 0.0
