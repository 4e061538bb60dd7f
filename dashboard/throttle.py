"""How often somebody may be wrong about a password.

Counted in the broker, so that several web processes count together: failures of one name from one
address, and of one address whatever the name. A count ends by itself :data:`WINDOW_S` after its
first failure. While the broker is away each process counts for itself: it is slower to tire, and
never lets everybody through.

The address is the one the web server names: behind a proxy it is the visitor's only if
``FORWARDED_ALLOW_IPS`` trusts that proxy.
"""

from __future__ import annotations

import hashlib

import redis
from django.core.cache import cache

from runs import live

WINDOW_S = 900
PER_NAME = 10
"""Failures of one name from one address."""
PER_ADDRESS = 60
"""Failures from one address: an office behind one address has many people."""


def refused(name: str, address: str) -> bool:
    """Whether no password is looked at now."""
    found = _read([key for key, _ in _keys(name, address)])
    limits = [limit for _, limit in _keys(name, address)]
    return any(count >= limit for count, limit in zip(found, limits, strict=True))


def failed(name: str, address: str) -> None:
    for key, _ in _keys(name, address):
        _count(key)


def succeeded(name: str, address: str) -> None:
    """Their own failures are forgotten; the address' are not, or one account would be a way to
    try on all the others."""
    key = _keys(name, address)[0][0]
    cache.delete(key)
    try:
        live.client().delete(key)
    except (redis.RedisError, OSError):
        return


def _keys(name: str, address: str) -> tuple[tuple[str, int], tuple[str, int]]:
    who = hashlib.sha256(f"{name.casefold()}\0{address}".encode(errors="replace")).hexdigest()[:32]
    where = hashlib.sha256(address.encode(errors="replace")).hexdigest()[:32]
    return (
        (f"archipelago:signin:name:{who}", PER_NAME),
        (f"archipelago:signin:from:{where}", PER_ADDRESS),
    )


def _read(keys: list[str]) -> list[int]:
    local = [int(cache.get(key, 0)) for key in keys]
    try:
        shared = [int(value or 0) for value in live.client().mget(keys)]
    except (redis.RedisError, OSError):
        return local
    return [max(pair) for pair in zip(local, shared, strict=True)]


def _count(key: str) -> None:
    try:
        with live.client().pipeline() as pipe:
            pipe.set(key, 0, nx=True, ex=WINDOW_S)
            pipe.incr(key)
            pipe.execute()
    except (redis.RedisError, OSError):
        cache.add(key, 0, WINDOW_S)
        try:
            cache.incr(key)
        except ValueError:  # it ended between the two
            cache.add(key, 1, WINDOW_S)
