"""Whether the control plane works: database, broker, and workers that do.

Each worker (control, ingest, launch) writes a heartbeat at each tick of beat's, so a missing one
means that beat or that worker is away, or too busy to take a tick. What answers here is for load
balancers and people on call, without a sign-in, so it names no hosts and repeats no errors.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any

import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.utils import timezone

from runs import live_stream
from runs.backends import storage_health
from runs.disk import disk_state
from runs.models import Run
from runs.schema import compare_schema
from runs.states import RUN_LIVE

HEARTBEAT = "archipelago:heartbeat"
"""Of control: beat ticks, and the control worker takes its ticks."""
INGEST = "archipelago:heartbeat:ingest"
LAUNCH = "archipelago:heartbeat:launch"
"""Of the worker that launches replicas, deletes runs and delivers webhooks."""
KEPT_S = 86_400
STALE_S = 30.0
"""A tick comes every second; a worker that is busy launching may let some pass."""
LAUNCH_STALE_S = 180.0
"""All processes of the launch worker can be busy for a while, with a backend or a deletion."""
AHEAD_S = 5.0
"""A heartbeat may be this far in the future: clocks of several machines differ."""
STALE_RUN_S = 180
"""How long a run that trains may say nothing before a page calls what it shows old. Replicas send
telemetry every few seconds, but a long validation or a slow bucket is no trouble yet."""


def beat(name: str = HEARTBEAT) -> None:
    """A worker has taken a tick. Losing one is no harm."""
    with contextlib.suppress(redis.RedisError, OSError):
        live_stream.client().set(name, timezone.now().timestamp(), ex=KEPT_S)


def heartbeat_age_s(name: str = HEARTBEAT) -> float | None:
    """Negative for one that was written before the clock was set back. None when there was none
    for a day, or the broker is away."""
    try:
        found: Any = live_stream.client().get(name)
    except (redis.RedisError, OSError):
        return None
    return None if found is None else timezone.now().timestamp() - float(found)


def is_fresh(age_s: float, *, stale_s: float = STALE_S) -> bool:
    """A heartbeat from the future is not: the clock was set back, and none came since."""
    return -AHEAD_S <= age_s <= stale_s


def silent_since() -> str | None:
    """When a worker was last heard of, if that is too long ago; '' when it is not known. None while
    one is at work, and while the broker is away: then it cannot be known, and pages say that."""
    try:
        found: Any = live_stream.client().get(HEARTBEAT)
    except (redis.RedisError, OSError):
        return None
    return since(found, now=timezone.now())


def since(written: Any, *, now: datetime) -> str | None:
    """:func:`silent_since` of what stands in the broker."""
    if written is None:
        return ""
    at = datetime.fromtimestamp(float(written), UTC)
    if is_fresh((now - at).total_seconds()):
        return None
    return min(at, now).isoformat()


def is_stale(run: Run, *, now: datetime) -> bool:
    """It trains, and nothing has come of it for long."""
    seen = run.last_seen_at
    age_s = (now - seen).total_seconds() if seen else 0.0
    return run.state in RUN_LIVE and age_s > STALE_RUN_S


def readiness() -> dict[str, str]:
    """Part -> ``ok``, or what is wrong in few words."""
    broker = _broker()
    return {
        "database": _database(),
        "broker": broker,
        "disk": disk_state(settings.VAR_DIR),
        "worker": _heartbeat(HEARTBEAT, broker),
        "ingest": _heartbeat(INGEST, broker),
        "launch": _heartbeat(LAUNCH, broker, stale_s=LAUNCH_STALE_S),
    }


def _heartbeat(name: str, broker: str, *, stale_s: float = STALE_S) -> str:
    if broker != "ok":
        return "unknown"
    age_s = heartbeat_age_s(name)
    if age_s is None:
        return "never heard of"
    if is_fresh(age_s, stale_s=stale_s):
        return "ok"
    if age_s < 0:
        return f"its heartbeat is {-age_s:.0f} s in the future: the clock was set back"
    return f"silent for {age_s:.0f} s"


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
    return storage_health.database_problem() or "ok"


def _broker() -> str:
    try:
        live_stream.client().ping()
    except (redis.RedisError, OSError):
        return "away"
    return "ok"
