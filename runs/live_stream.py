"""Publish deltas to browsers through one Redis stream.

The reconciler adds one entry per run for each tick that changed something. Each web process follows
the stream and fans it out to its viewers.

A tick sets a marker before it commits changes and clears it after publishing them. A tick that
finds the marker of an earlier one makes every viewer reload its snapshot: a worker died between
commit and publication. Nothing here raises when Redis is unavailable.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import redis
from django.conf import settings

logger = logging.getLogger(__name__)

STREAM = "archipelago:live"
ALERTS = "alerts"
"""Topic of the alerts of all runs; all other topics of the stream are ids of runs."""
MAXLEN = 10_000
DELTA_BYTES = 512 * 1024
"""Largest entry; pages reload their snapshot instead of a larger one. The contents of a bucket
determine the size of a delta, and the stream keeps many."""
PENDING_S = 7 * 86_400
"""Lifetime of a marker: longer than workers are down. It removes markers of deleted runs."""
RESYNC_EVERY_S = 5
"""Shortest time between two reloads of one run, so that a tick that keeps failing does not make
every page reload each second."""

RETRY_S = 5.0
"""How long pages do without a Redis that did not answer in time."""

_down = False
_retry_at: dict[str, float] = {}
"""URL of a Redis that did not answer in time -> when a page asks it again."""


@cache
def _client(pid: int, url: str) -> redis.Redis:
    """One connection pool per process, created after the fork."""
    return redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)


def client() -> redis.Redis:
    return _client(os.getpid(), settings.REDIS_URL)


def ask(
    request: Callable[[redis.Redis], Any], *, clock: Callable[[], float] = time.monotonic
) -> Any:
    """Read from Redis for a page, whose reader waits for it.

    A Redis that accepts connections and never answers costs the timeout of its client. After one,
    only one page in :data:`RETRY_S` asks it. One that refuses connections costs nothing.

    Raises:
        RedisError, OSError: Redis is unavailable, or did not answer a moment ago.
    """
    url, now = settings.REDIS_URL, clock()
    if retry_at := _retry_at.get(url):
        if now < retry_at:
            raise redis.TimeoutError("no answer a moment ago")
        _retry_at[url] = now + RETRY_S  # pages meanwhile do not wait too
    try:
        answer = request(client())
    except redis.TimeoutError:
        _retry_at[url] = clock() + RETRY_S
        raise
    _retry_at.pop(url, None)
    return answer


def publish(run_id: str, delta: Mapping[str, Any]) -> bool:
    """Publish a delta (any of the snapshot's keys) to the viewers of a run.

    Returns False if Redis is unavailable.
    """
    data = json.dumps(delta, separators=(",", ":"), allow_nan=False)
    if len(data) > DELTA_BYTES:
        return resync(run_id)
    return _add({"run": str(run_id), "data": data})


def announce_alerts() -> bool:
    """Report to every page that an alert was opened, closed or acknowledged; the page then asks
    the server. Returns False if Redis is unavailable."""
    return publish(ALERTS, {})


def resync(run_id: str) -> bool:
    """Make the viewers of a run reload its snapshot.

    Returns False if Redis is unavailable or a reload was published a moment ago.
    """
    key = f"archipelago:resynced:{run_id}"
    with contextlib.suppress(redis.RedisError, OSError):
        if client().set(key, "1", nx=True, ex=RESYNC_EVERY_S):
            return _add({"run": str(run_id), "data": "{}", "resync": "1"})
    return False


def _add(entry: dict[str, str]) -> bool:
    global _down
    try:
        fields: Any = entry  # the client's type is invariant in all possible key types
        client().xadd(STREAM, fields, maxlen=MAXLEN, approximate=True)
    except (redis.RedisError, OSError) as error:
        if not _down:
            logger.warning("live updates are off until Redis is available again: %s", error)
        _down = True
        return False
    _down = False
    return True


def mark_pending(run_id: str) -> bool:
    """Mark changes of a run as pending, before they are committed.

    Returns False if earlier changes are still pending: their worker died, or could not reach Redis
    to publish them.
    """
    with contextlib.suppress(redis.RedisError, OSError):
        return bool(client().set(_pending_key(run_id), "1", nx=True, ex=PENDING_S))
    return True


def mark_published(run_id: str) -> None:
    """Clear the marker that :func:`mark_pending` set."""
    with contextlib.suppress(redis.RedisError, OSError):
        client().delete(_pending_key(run_id))


def _pending_key(run_id: str) -> str:
    return f"archipelago:pending:{run_id}"


def latest_id() -> str:
    """ID of the newest entry, from which a viewer can follow the stream without a gap.

    '' if Redis is unavailable, or was a moment ago: the page polls once it follows the stream.
    """
    try:
        entries: Any = ask(lambda client: client.xrevrange(STREAM, count=1))
    except (redis.RedisError, OSError):
        return ""
    if not entries:
        return "0-0"
    newest = entries[0][0]
    return newest.decode() if isinstance(newest, bytes) else str(newest)
