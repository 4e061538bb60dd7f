"""Limits on sign-in attempts.

Attempts are counted before the password is checked, so that parallel requests count as well, and in
the broker, so that all web processes count together. A count ends :data:`WINDOW_S` after its first
attempt. While the broker is away each process counts for itself.

Four counts: of a name from one network, of one network, of a name from any network, and of all.
A network is one IPv4 address, or the 64 bits of IPv6 that one customer has. The last two stop an
attacker with many addresses; so that they lock no user out, they do not apply to a network from
which that name has signed in within :data:`KNOWN_S`.

The address is the one :mod:`dashboard.security.proxies` found: never what a client wrote into a
header.
"""

from __future__ import annotations

import hashlib
import ipaddress
from typing import Any

import redis
from django.core.cache import cache
from django.http import HttpRequest

from runs import live_stream

WINDOW_S = 900
PER_NAME = 10
"""Attempts for one name from one network."""
PER_ADDRESS = 60
"""Attempts from one network: an office behind one address has many people."""
PER_ACCOUNT = 100
"""Attempts for one name from all networks."""
IN_ALL = 2000
"""Attempts of all names from all networks."""
KNOWN_S = 30 * 86_400


def address_of(request: HttpRequest) -> str:
    return str(request.META.get("REMOTE_ADDR", ""))


def refused(name: str, address: str) -> bool:
    """Count an attempt; True if it is one too many and no password is to be checked."""
    own, network, account, total = _keys(name, address)
    counts = {key: _count(key) for key in (own, network, account, total)}
    if counts[own] > PER_NAME or counts[network] > PER_ADDRESS:
        return True
    if counts[account] <= PER_ACCOUNT and counts[total] <= IN_ALL:
        return False
    return not _get(_known(name, address))


def succeeded(name: str, address: str) -> None:
    """Take the attempt back and forget the failures of this name from this network.

    Other failures of the network stay counted: otherwise one own account would allow any number of
    attempts on all others.
    """
    own, *others = _keys(name, address)
    _delete(own)
    for key in others:
        _uncount(key)
    _remember(_known(name, address))


def retract(name: str, address: str) -> None:
    """Take back an attempt at which no password was wrong."""
    for key in _keys(name, address):
        _uncount(key)


def _keys(name: str, address: str) -> tuple[str, str, str, str]:
    name, network = name.casefold(), network_of(address)
    return (
        f"archipelago:signin:name:{_hash(name, network)}",
        f"archipelago:signin:from:{_hash(network)}",
        f"archipelago:signin:account:{_hash(name)}",
        "archipelago:signin:all",
    )


def _known(name: str, address: str) -> str:
    return f"archipelago:signin:known:{_hash(name.casefold(), network_of(address))}"


def network_of(address: str) -> str:
    """What one client can choose addresses in."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:32]


def _count(key: str) -> int:
    """One more; the count with it. Both counts are kept, so that a broker that comes back does not
    begin at none."""
    cache.add(key, 0, WINDOW_S)
    try:
        here = int(cache.incr(key))
    except ValueError:  # it ended between the two
        cache.add(key, 1, WINDOW_S)
        here = 1
    try:
        with live_stream.client().pipeline() as pipe:
            pipe.set(key, 0, nx=True, ex=WINDOW_S)
            pipe.incr(key)
            return max(here, int(pipe.execute()[1]))
    except (redis.RedisError, OSError):
        return here


def _uncount(key: str) -> None:
    if cache.get(key):
        cache.decr(key)
    try:
        if int(live_stream.client().get(key) or 0) > 0:
            live_stream.client().decr(key)
    except (redis.RedisError, OSError):
        return


def _get(key: str) -> Any:
    try:
        return cache.get(key) or live_stream.client().get(key)
    except (redis.RedisError, OSError):
        return None


def _remember(key: str) -> None:
    cache.set(key, 1, KNOWN_S)
    try:
        live_stream.client().set(key, 1, ex=KNOWN_S)
    except (redis.RedisError, OSError):
        return


def _delete(key: str) -> None:
    cache.delete(key)
    try:
        live_stream.client().delete(key)
    except (redis.RedisError, OSError):
        return
