"""Pools, replicas and their attempts as rows that page, polling and live stream share.

Each function costs a constant number of queries, whatever the number of replicas; a test counts
them. Money is null where a price is not known, and ``cost_known`` is false where it leaves
something out.
"""

from __future__ import annotations

from typing import Any

from django.db.models import Count, Max, Q, QuerySet, Sum
from django.utils import timezone

from executors.registry import BACKENDS
from runs.backends.circuit_breaker import FAILURES, LONGEST
from runs.backends.executors import catalogue
from runs.json_values import finite, iso, mapping
from runs.metrics.system_series import NEWEST
from runs.models import Replica, ReplicaAttempt, ReplicaPool, Run
from runs.queries.replica_history import console_url
from runs.states import REPLICA_ENDED, REPLICA_LIVE, ReplicaState
from runs.times import is_due

AT_WORK = REPLICA_LIVE | {ReplicaState.SUSPECT}
"""States in which there is a process that uses something."""


def replica_rows(run: Run) -> list[dict[str, Any]]:
    """Two queries."""
    replicas = Replica.objects.filter(run=run).select_related("pool").order_by("number")
    jobs = _attempts_by(ReplicaAttempt.objects.filter(replica__run=run), "replica_id")
    return [_replica_row(r, jobs.get(r.pk, {})) for r in replicas]


def replica_row(replica: Replica) -> dict[str, Any]:
    """The same for one, whose pool has been read."""
    jobs = _attempts_by(ReplicaAttempt.objects.filter(replica=replica), "replica_id")
    return _replica_row(replica, jobs.get(replica.pk, {}))


def _replica_row(r: Replica, job: dict[str, Any]) -> dict[str, Any]:
    return {
        "number": r.number,
        "state": str(r.state),
        "state_reason": r.state_reason,
        "pool": r.pool_id,
        "backend": r.pool.backend,
        "backend_state": r.backend_state,
        "attempt": job.get("last", 0),
        "deadline_at": iso(job.get("deadline_at")),
        "cost_usd": _cost(job),
        "cost_known": not job.get("unpriced", 0),
        "beat_at": iso(r.beat_at),
        "beat_interval_s": r.beat_interval_s or None,
        "round": r.round,
        "step": r.step,
        "tokens": r.tokens,
        "loss": finite(r.loss),
        "tokens_per_s": finite(r.tokens_per_s),
        "wait_fraction": finite(r.wait_fraction),
        **{name: finite(getattr(r, name)) if r.state in AT_WORK else None for name in NEWEST},
        "restarts": r.restarts,
        "device": r.device,
        "host": r.host,
        "incarnation": r.incarnation,
    }


def pool_rows(run: Run) -> list[dict[str, Any]]:
    """Three queries."""
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
    return {
        "id": pool.pk,
        "backend": pool.backend,
        "name": pool_name(pool),
        "hardware": pool.hardware,
        "hardware_label": hardware.label if hardware else pool.hardware,
        "region": pool.region,
        "spot": pool.spot,
        "image": pool.image,
        "credential": pool.credential.name if pool.credential else None,
        "timeout_s": pool.timeout_s,
        "wanted": pool.count,
        "live": count.get("live", 0),
        "ended": count.get("over", 0),
        "replicas": count.get("all", 0),
        "price_usd_h": finite(pool.price_usd_h),
        "max_price_usd_h": finite(pool.max_price_usd_h),
        "cost_usd": _cost(job),
        "cost_known": not job.get("unpriced", 0),
        "breaker": breaker_row(pool),
    }


def pool_name(pool: ReplicaPool) -> str:
    """As people call it: ``Modal H100``, ``CPU of this machine``."""
    if pool.backend == "local":
        hardware = catalogue().get(pool.backend, pool.hardware)
        return hardware.label if hardware else f"Local {pool.hardware}"
    return f"{BACKENDS.get(pool.backend, pool.backend)} {pool.hardware}"


def breaker_row(pool: ReplicaPool) -> dict[str, Any]:
    """``state``: ``ok``, ``failing`` (tried on), ``closed`` (left alone until ``closed_until``),
    ``trying`` (one at a time), ``person`` or ``price`` (it is above the limit). ``trouble`` is in
    the backend's own words, ``advice`` says what somebody can do."""
    label = BACKENDS.get(pool.backend, pool.backend)
    state, advice = "ok", ""
    if pool.needs_person:
        state = "person"
        whose = f"the credential {pool.credential}" if pool.credential else "the server's own"
        advice = (
            f"Nothing is launched here until somebody acts. Put the account at {label} right "
            f"({whose}): token, permission, quota or bill. Then test the credential in the "
            "administration, or restart a replica of this pool."
        )
    elif pool.failures >= FAILURES:
        waits = not is_due(pool.closed_until, LONGEST, timezone.now())
        state = "closed" if waits else "trying"
        advice = "Then one replica is tried, and the first that works opens the pool again."
        if not waits:
            advice = "One replica at a time is tried; the first that works opens the pool again."
    elif pool.failures:
        state, advice = "failing", "It is tried again by itself."
    trouble = pool.trouble if state != "ok" else ""
    if pool.held and state in ("ok", "failing"):
        state, trouble = "price", pool.held
        advice = (
            "It is launched as soon as the price is within the limit: when the price falls, or "
            "when somebody raises the limit (Scale)."
        )
    return {
        "state": state,
        "failures": pool.failures,
        "closed_until": iso(pool.closed_until) if state == "closed" else None,
        "trouble": trouble,
        "advice": advice,
    }


def attempt_rows(replica: Replica) -> list[dict[str, Any]]:
    """Newest first. One query."""
    return [
        {
            "number": a.number,
            "launch_key": a.launch_key,
            "job": dict(mapping(mapping(a.handle).get("data"))),
            "url": console_url(a.handle),
            "cause": a.cause,
            "exit_code": a.exit_code,
            "message": a.message,
            "created_at": iso(a.created_at),
            "launched_at": iso(a.launched_at),
            "started_at": iso(a.started_at),
            "ended_at": iso(a.ended_at),
            "deadline_at": iso(a.deadline_at),
            "price_usd_h": finite(a.price_usd_h),
            "cost_usd": finite(a.cost_usd),
        }
        for a in replica.attempts.order_by("-number")
    ]


def _attempts_by(attempts: QuerySet[ReplicaAttempt], name: str) -> dict[int, dict[str, Any]]:
    """What attempts add up to, by the column ``name``."""
    rows = (
        attempts.order_by()
        .values(name)
        .annotate(
            last=Max("number"),
            cost=Sum("cost_usd"),
            unpriced=Count("id", filter=Q(price_usd_h=None, launched_at__isnull=False)),
            deadline_at=Max("deadline_at", filter=Q(ended_at=None)),
        )
    )
    return {row[name]: row for row in rows}


def _cost(job: dict[str, Any]) -> float | None:
    """Null when nothing of it is known; 0 when nothing was launched."""
    cost = job.get("cost")
    if cost is not None:
        return finite(float(cost))
    return None if job.get("unpriced", 0) else 0.0
