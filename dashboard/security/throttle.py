"""Limits on sign-in attempts.

Attempts are counted before the password is checked, so that parallel requests count too, and in the
broker, so that all web processes share the counts. A count expires :data:`WINDOW_S` after its first
attempt. Without a broker each process counts for itself.

There are four counts: per name and network, per network, per name, and in total. A network is one
IPv4 address, or an IPv6 /64, which one customer has. The last two stop attackers with many
addresses. So that they do not lock out users, they do not apply to a network from which that name
has signed in within :data:`KNOWN_S`.

The address comes from :mod:`dashboard.security.proxies`, never from a header of the client.
"""

from __future__ import annotations

import hashlib
import ipaddress
from contextlib import suppress
from typing import Any

import redis
from django.core.cache import cache
from django.http import HttpRequest

from runs import live_stream

WINDOW_S = 900
PER_NAME = 10
"""Attempts for one name from one network."""
PER_ADDRESS = 60
"""Attempts from one network: many users of an office can share one address."""
PER_ACCOUNT = 100
"""Attempts for one name from all networks."""
IN_ALL = 2000
"""Attempts of all names from all networks."""
KNOWN_S = 30 * 86_400
_AWAY = (redis.RedisError, OSError)
"""Errors of a broker that does not respond."""


def address_of(request: HttpRequest) -> str:
    return str(request.META.get("REMOTE_ADDR", ""))


def refused(name: str, address: str) -> bool:
    """Count an attempt. Returns True if it exceeds a limit; then check no password."""
    own, network, account, total = _keys(name, address)
    counts = {key: _count(key) for key in (own, network, account, total)}
    if counts[own] > PER_NAME or counts[network] > PER_ADDRESS:
        return True
    if counts[account] <= PER_ACCOUNT and counts[total] <= IN_ALL:
        return False
    return not _get(_known(name, address))


def succeeded(name: str, address: str) -> None:
    """Undo the count of this attempt, and forget failures of this name from this network.

    Other failures from the network remain counted: otherwise one valid account would allow any
    number of attempts on other accounts.
    """
    own, *others = _keys(name, address)
    _delete(own)
    for key in others:
        _uncount(key)
    _remember(_known(name, address))


def retract(name: str, address: str) -> None:
    """Undo the count of an attempt that did not fail because of the password."""
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
    """The network whose addresses one client can choose from."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:32]


def _count(key: str) -> int:
    """Increment the count and return it. The process keeps a count too, so that it does not restart
    at zero when the broker comes back empty."""
    cache.add(key, 0, WINDOW_S)
    try:
        local = int(cache.incr(key))
    except ValueError:  # it expired between the two calls
        cache.add(key, 1, WINDOW_S)
        local = 1
    try:
        with live_stream.client().pipeline() as pipe:
            pipe.set(key, 0, nx=True, ex=WINDOW_S)
            pipe.incr(key)
            return max(local, int(pipe.execute()[1]))
    except _AWAY:
        return local


def _uncount(key: str) -> None:
    if cache.get(key):
        cache.decr(key)
    with suppress(*_AWAY):
        if int(live_stream.client().get(key) or 0) > 0:
            live_stream.client().decr(key)


def _get(key: str) -> Any:
    try:
        return cache.get(key) or live_stream.client().get(key)
    except _AWAY:
        return None


def _remember(key: str) -> None:
    cache.set(key, 1, KNOWN_S)
    with suppress(*_AWAY):
        live_stream.client().set(key, 1, ex=KNOWN_S)


def _delete(key: str) -> None:
    cache.delete(key)
    with suppress(*_AWAY):
        live_stream.client().delete(key)
