"""Deltas for the browser, through one Redis stream.

The reconciler adds one entry per run and tick that changed something; each web process follows the
stream and fans out to its viewers. The stream is a convenience: what it loses, a page gets from
its next snapshot. Nothing here raises when Redis is away.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import redis
from django.conf import settings

logger = logging.getLogger(__name__)

STREAM = "archipelago:live"
MAXLEN = 10_000

_down = False


@cache
def _client(pid: int, url: str) -> redis.Redis:
    """One connection pool per process; made after the fork."""
    return redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)


def client() -> redis.Redis:
    return _client(os.getpid(), settings.REDIS_URL)


def publish(run_id: str, delta: Mapping[str, Any]) -> None:
    """Add a delta (any of the snapshot's keys) for everybody who watches ``run_id``."""
    global _down
    try:
        client().xadd(
            STREAM,
            {"run": str(run_id), "data": json.dumps(delta, separators=(",", ":"), allow_nan=False)},
            maxlen=MAXLEN,
            approximate=True,
        )
    except (redis.RedisError, OSError) as error:
        if not _down:
            logger.warning("live updates are off until Redis is back: %s", error)
        _down = True
    else:
        _down = False


def latest_id() -> str:
    """The id of the newest entry: a stream resumed there misses nothing that comes later.
    '' when Redis is away."""
    try:
        found: Any = client().xrevrange(STREAM, count=1)
    except (redis.RedisError, OSError):
        return ""
    if not found:
        return "0-0"
    newest = found[0][0]
    return newest.decode() if isinstance(newest, bytes) else str(newest)
