"""Deltas for the browser, through one Redis stream.

The reconciler adds one entry per run and tick that changed something; each web process follows the
stream and fans out to its viewers. A tick notes that it begins to store and strikes the note out
when it has told; one that finds an older tick's note tells the pages to load their snapshot, for
what that tick stored was never told. Nothing here raises when Redis is away.
"""

from __future__ import annotations

import contextlib
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
DELTA_BYTES = 512 * 1024
"""Of one entry. Pages load a snapshot in place of a larger one: what a bucket holds decides how
large a delta is, and the stream keeps many."""
UNTOLD_S = 7 * 86_400
"""Longer than workers are away; it clears the notes of runs that are gone."""
RESYNC_EVERY_S = 5
"""Of one run: a tick that fails again and again must not have every page load every second."""

_down = False


@cache
def _client(pid: int, url: str) -> redis.Redis:
    """One connection pool per process; made after the fork."""
    return redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)


def client() -> redis.Redis:
    return _client(os.getpid(), settings.REDIS_URL)


def publish(run_id: str, delta: Mapping[str, Any]) -> bool:
    """Add a delta (any of the snapshot's keys) for everybody who watches ``run_id``. False when
    Redis is away."""
    data = json.dumps(delta, separators=(",", ":"), allow_nan=False)
    if len(data) > DELTA_BYTES:
        return resync(run_id)
    return _add({"run": str(run_id), "data": data})


def resync(run_id: str) -> bool:
    """Tell everybody who watches ``run_id`` to load its snapshot again. False when Redis is away,
    or they were told a moment ago."""
    key = f"archipelago:resynced:{run_id}"
    with contextlib.suppress(redis.RedisError, OSError):
        if client().set(key, "1", nx=True, ex=RESYNC_EVERY_S):
            return _add({"run": str(run_id), "data": "{}", "resync": "1"})
    return False


def _add(entry: dict[str, str]) -> bool:
    global _down
    try:
        fields: Any = entry  # its type in the client is of all that may be a key
        client().xadd(STREAM, fields, maxlen=MAXLEN, approximate=True)
    except (redis.RedisError, OSError) as error:
        if not _down:
            logger.warning("live updates are off until Redis is back: %s", error)
        _down = True
        return False
    _down = False
    return True


def begin(run_id: str) -> bool:
    """Note that what is about to be stored of a run is to be told. False if what was noted before
    never was: its worker died, or could not reach Redis when it told."""
    with contextlib.suppress(redis.RedisError, OSError):
        return bool(client().set(_untold(run_id), "1", nx=True, ex=UNTOLD_S))
    return True


def told(run_id: str) -> None:
    """What :func:`begin` noted has been told."""
    with contextlib.suppress(redis.RedisError, OSError):
        client().delete(_untold(run_id))


def _untold(run_id: str) -> str:
    return f"archipelago:untold:{run_id}"


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
