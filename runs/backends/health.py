"""Health of the control plane: database, broker and workers.

Each worker (control, ingest, launch) writes a heartbeat at each tick of Celery beat. A missing
heartbeat means that beat or the worker is down, or too busy to process a tick. Load balancers and
operators on call read the result without signing in, so it contains no host names and no errors.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any

import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.utils import timezone

from diloco.protocol.control_pace import TELEMETRY_INTERVAL_S
from runs import live_stream
from runs.backends import storage_health
from runs.disk import disk_state
from runs.models import Run
from runs.schema import compare_schema
from runs.states import RUN_LIVE

HEARTBEAT = "archipelago:heartbeat"
"""Heartbeat of the control worker."""
INGEST = "archipelago:heartbeat:ingest"
LAUNCH = "archipelago:heartbeat:launch"
"""Heartbeat of the worker that launches replicas, deletes runs and delivers webhooks."""
KEPT_S = 86_400
STALE_S = 30.0
"""A tick comes every second; a busy worker can miss some."""
LAUNCH_STALE_S = 180.0
"""All processes of the launch worker can be busy for a while, with a backend or a deletion."""
AHEAD_S = 5.0
"""A heartbeat can be this far in the future, because the clocks of machines differ."""
STALE_RUN_S = 180
"""Age of telemetry from which pages call the data of a running run out of date. A long validation
or a slow bucket can delay it."""
LATE_RUN_S = 2 * TELEMETRY_INTERVAL_S
"""Age of telemetry from which pages show that it is late: every replica has missed a report."""


def beat(name: str = HEARTBEAT) -> None:
    """Write the heartbeat of a worker. A lost heartbeat does no harm."""
    with contextlib.suppress(redis.RedisError, OSError):
        live_stream.client().set(name, timezone.now().timestamp(), ex=KEPT_S)


def heartbeat_age_s(name: str = HEARTBEAT) -> float | None:
    """Age of a worker's heartbeat in seconds, negative if the clock was set back since.

    None if there was no heartbeat for a day, or if the broker is unavailable.
    """
    try:
        written: Any = live_stream.client().get(name)
    except (redis.RedisError, OSError):
        return None
    return None if written is None else timezone.now().timestamp() - float(written)


def is_fresh(age_s: float, *, stale_s: float = STALE_S) -> bool:
    """Whether a heartbeat of that age is recent.

    A heartbeat from the future is not: the clock was set back, and no heartbeat was written since.
    """
    return -AHEAD_S <= age_s <= stale_s


def silent_since() -> str | None:
    """Time of the last heartbeat of the control worker if it is stale; '' if unknown.

    None while the worker runs, and while the broker is unavailable: pages then report the broker.
    """
    try:
        written: Any = live_stream.ask(lambda client: client.get(HEARTBEAT))
    except (redis.RedisError, OSError):
        return None
    return since(written, now=timezone.now())


def since(written: Any, *, now: datetime) -> str | None:
    """:func:`silent_since` for a value read from the broker."""
    if written is None:
        return ""
    at = datetime.fromtimestamp(float(written), UTC)
    if is_fresh((now - at).total_seconds()):
        return None
    return min(at, now).isoformat()


def is_stale(run: Run, *, now: datetime) -> bool:
    """Whether a running run has sent no telemetry for :data:`STALE_RUN_S`."""
    seen = run.last_seen_at
    age_s = (now - seen).total_seconds() if seen else 0.0
    return run.state in RUN_LIVE and age_s > STALE_RUN_S


def readiness() -> dict[str, str]:
    """Component -> ``ok``, or a short description of the problem."""
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
        return "no heartbeat"
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
        if schema.missing or schema.skipped:
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
