"""Whether the control plane works: database, broker, and workers that do.

A worker says that it is there at each tick of beat's, so a missing word means that beat or every
worker is away, or too busy to take a tick. What answers here is for load balancers and people on
call; nobody has to sign in for it, so it names no hosts and repeats no errors.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any

import redis
from django.db import DatabaseError, connection
from django.utils import timezone

from runs import live
from runs.models import Run
from runs.schema import compare_schema
from runs.states import RUN_LIVE

HEARTBEAT = "archipelago:heartbeat"
KEPT_S = 86_400
STALE_S = 30.0
"""A tick comes every second; a worker that is busy launching may let some pass."""
STALE_RUN_S = 180
"""How long a run that trains may say nothing before a page calls what it shows old. Replicas send
telemetry every few seconds, but a long validation or a slow bucket is no trouble yet."""


def beat() -> None:
    """A worker is at work. Losing one is no harm."""
    with contextlib.suppress(redis.RedisError, OSError):
        live.client().set(HEARTBEAT, timezone.now().timestamp(), ex=KEPT_S)


def heartbeat_age_s() -> float | None:
    """None when no worker has been heard of for a day, or the broker is away."""
    try:
        found: Any = live.client().get(HEARTBEAT)
    except (redis.RedisError, OSError):
        return None
    return None if found is None else max(timezone.now().timestamp() - float(found), 0.0)


def silent_since() -> str | None:
    """When a worker was last heard of, if that is too long ago; '' when it is not known. None while
    one is at work, and while the broker is away: then nobody can tell, and pages say that."""
    try:
        found: Any = live.client().get(HEARTBEAT)
    except (redis.RedisError, OSError):
        return None
    return since(found, now=timezone.now())


def since(written: Any, *, now: datetime) -> str | None:
    """:func:`silent_since` of what stands in the broker."""
    if written is None:
        return ""
    at = datetime.fromtimestamp(float(written), UTC)
    return at.isoformat() if (now - at).total_seconds() > STALE_S else None


def is_stale(run: Run, *, now: datetime) -> bool:
    """It trains, and nothing has come of it for long."""
    seen = run.last_seen_at
    age_s = (now - seen).total_seconds() if seen else 0.0
    return run.state in RUN_LIVE and age_s > STALE_RUN_S


def readiness() -> dict[str, str]:
    """Part -> ``ok``, or what is wrong in few words."""
    broker = _broker()
    age_s = heartbeat_age_s() if broker == "ok" else None
    if age_s is None:
        worker = "never heard of" if broker == "ok" else "unknown"
    else:
        worker = "ok" if age_s <= STALE_S else f"silent for {age_s:.0f} s"
    return {"database": _database(), "broker": broker, "worker": worker}


def _database() -> str:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            cursor.fetchone()
        schema = compare_schema()
        if schema.newer:
            return "was migrated by a newer version"
        if schema.missing:
            return "has to be migrated"
    except DatabaseError:
        return "away"
    return "ok"


def _broker() -> str:
    try:
        live.client().ping()
    except (redis.RedisError, OSError):
        return "away"
    return "ok"
