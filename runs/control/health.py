"""Whether the control plane works: database, broker, and workers that do.

A worker says that it is there at each tick of beat's, so a missing word means that beat or every
worker is away, or too busy to take a tick. What answers here is for load balancers and people on
call; nobody has to sign in for it, so it names no hosts and repeats no errors.
"""

from __future__ import annotations

import contextlib
from typing import Any

import redis
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

from runs import live

HEARTBEAT = "archipelago:heartbeat"
KEPT_S = 86_400
STALE_S = 30.0
"""A tick comes every second; a worker that is busy launching may let some pass."""


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
        executor = MigrationExecutor(connection)
        if executor.migration_plan(executor.loader.graph.leaf_nodes()):
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
