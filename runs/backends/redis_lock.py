"""A lock with a time limit, in Redis: at most one reconciler per run at a time.

It saves work and keeps logs readable; correctness does not hang on it. Every write of the
reconciler is conditional, so two that overlap after a lease ran out do nothing twice.

Whoever holds a lease renews it, so that it is short although what is done under it may be long:
when a worker is killed, another takes over after :data:`TTL_S`, not after a task's time limit.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator

from redis import Redis
from redis.exceptions import RedisError

from runs import live_stream

TTL_S = 20.0

_TAKE = """
if redis.call('set', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
if redis.call('pttl', KEYS[1]) > tonumber(ARGV[2]) then
  redis.call('pexpire', KEYS[1], ARGV[2])
end
return 0
"""
"""Redis keeps the end of a key as a time of the wall clock. One that is further away than a lease
lasts was set before the clock was set back, so it is brought nearer: if its holder is alive, the
holder renews it."""
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"
_RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('pexpire', KEYS[1], ARGV[2]) end"


@contextlib.contextmanager
def lease(name: str, *, ttl_s: float = TTL_S) -> Iterator[bool]:
    """True inside if this process has the lease, False if another does. ``ttl_s`` is how long it
    lasts after this process was killed."""
    client = live_stream.client()
    key, token = f"archipelago:lease:{name}", secrets.token_hex(8)
    held = take(client, key, token, ttl_s)
    over = threading.Event()
    if held:
        threading.Thread(
            target=_renew, args=(client, key, token, ttl_s, over), daemon=True, name="lease"
        ).start()
    try:
        yield held
    finally:
        over.set()
        if held:
            client.eval(_RELEASE, 1, key, token)


def take(client: Redis, key: str, value: str, ttl_s: float) -> bool:
    """Set ``key`` for ``ttl_s`` unless it is set. A key that another process left behind ends after
    its own time also where the clock was set back meanwhile."""
    return bool(client.eval(_TAKE, 1, key, value, str(int(ttl_s * 1000))))


def _renew(client: Redis, key: str, token: str, ttl_s: float, over: threading.Event) -> None:
    while not over.wait(ttl_s / 4):
        # Redis may be away for a moment; what it has forgotten is not taken again.
        with contextlib.suppress(RedisError, OSError):
            client.eval(_RENEW, 1, key, token, str(int(ttl_s * 1000)))
