"""A lock with a time limit, in Redis: at most one reconciler per run at a time.

It saves work and keeps logs readable; correctness does not hang on it. Every write of the
reconciler is conditional, so two that overlap after a lease ran out do nothing twice.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from runs import live

TTL_S = 20.0

_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"


@contextlib.contextmanager
def lease(name: str, *, ttl_s: float = TTL_S) -> Iterator[bool]:
    """True inside if this process has the lease, False if another does."""
    client = live.client()
    key, token = f"archipelago:lease:{name}", secrets.token_hex(8)
    held = bool(client.set(key, token, nx=True, px=int(ttl_s * 1000)))
    try:
        yield held
    finally:
        if held:
            client.eval(_RELEASE, 1, key, token)
