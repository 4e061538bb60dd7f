"""A lock in Redis with a time limit: at most one reconciler per run at a time.

The lock saves work and keeps logs readable; correctness does not depend on it. Every write of the
reconciler is conditional, so two reconcilers that overlap after a lease expired do nothing twice.

The holder renews its lease, so that the lease can be short while the work is long: after a worker
is killed, another takes over within :data:`TTL_S` instead of the time limit of a task.
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
"""Redis stores the expiry of a key as a wall-clock time. An expiry further away than the duration
of a lease was set before the clock was set back, so it is shortened; a live holder renews it."""
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"
_RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('pexpire', KEYS[1], ARGV[2]) end"


@contextlib.contextmanager
def lease(name: str, *, ttl_s: float = TTL_S) -> Iterator[bool]:
    """Take a lease; yields whether this process has it.

    ``ttl_s`` is how long the lease outlives this process if it is killed.
    """
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
            release(client, key, token)


def release(client: Redis, key: str, value: str) -> None:
    """Delete ``key`` if it still has this value: otherwise it expired, and another has it."""
    client.eval(_RELEASE, 1, key, value)


def take(client: Redis, key: str, value: str, ttl_s: float) -> bool:
    """Set ``key`` for ``ttl_s`` unless it exists.

    The key of a dead process expires in time even if the clock was set back.
    """
    try:
        return bool(client.eval(_TAKE, 1, key, value, str(int(ttl_s * 1000))))
    except (RedisError, OSError):
        # It can be set although the answer was lost. A server that hangs answers this as little.
        threading.Thread(target=_forget, args=(client, key, value), daemon=True).start()
        raise


def _forget(client: Redis, key: str, value: str) -> None:
    with contextlib.suppress(RedisError, OSError):
        release(client, key, value)


def _renew(client: Redis, key: str, token: str, ttl_s: float, over: threading.Event) -> None:
    while not over.wait(ttl_s / 4):
        # Redis can be unavailable for a moment. A lease that has expired is not taken again.
        with contextlib.suppress(RedisError, OSError):
            client.eval(_RENEW, 1, key, token, str(int(ttl_s * 1000)))
