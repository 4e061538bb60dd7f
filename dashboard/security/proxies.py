"""The client address of a request behind proxies.

``X-Forwarded-For`` and ``X-Forwarded-Proto`` are used only for requests from an address in
``ARCHIPELAGO_TRUSTED_PROXIES``. Every proxy appends the address of its peer, so entries are read
from the right; the first one that is not a trusted proxy is the client. Entries left of it were
sent by the client and can be forged. Only this module reads these headers: uvicorn runs with
``--no-proxy-headers``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Application = Callable[[Any, Any, Any], Awaitable[None]]

HEADER_BYTES = 4096
HOPS = 32
"""Maximum number of header entries that are read, from the right."""


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and networks such as ``10.0.0.0/8``; raises ``ValueError`` for anything else."""
    return tuple(ipaddress.ip_network(text.strip(), strict=False) for text in texts if text.strip())


def client_address(peer: str, forwarded_for: str, trusted: Sequence[Network]) -> str:
    """The right-most address that is not a trusted proxy. ``peer`` opened the connection.

    An entry that is not an address ends the search: the client is the hop that reported it.
    """
    nearest = peer
    if not _is_trusted(peer, trusted):
        return nearest
    for entry in reversed(forwarded_for[-HEADER_BYTES:].split(",")[-HOPS:]):
        hop = _address(entry)
        if hop is None:
            break
        nearest = str(hop)
        if not _is_trusted(nearest, trusted):
            break
    return nearest


def _is_trusted(text: str, trusted: Sequence[Network]) -> bool:
    address = _address(text)
    return address is not None and any(address in network for network in trusted)


def _address(text: str) -> Address | None:
    """Parse ``1.2.3.4``, ``1.2.3.4:80``, ``::1`` and ``[::1]:80``; IPv4-mapped IPv6 as IPv4."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(parsed, "ipv4_mapped", None)
    return mapped or parsed


class TrustedProxies:
    """ASGI middleware that replaces ``scope["client"]`` and ``scope["scheme"]`` by the client's."""

    def __init__(self, application: Application, trusted: Sequence[Network]) -> None:
        self.application = application
        self.trusted = trusted

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and scope.get("client"):
            peer, port = scope["client"]
            if _is_trusted(peer, self.trusted):
                scope = dict(scope)
                address = client_address(peer, _header(scope, b"x-forwarded-for"), self.trusted)
                scope["client"] = (address, 0 if address != peer else port)
                scheme = _header(scope, b"x-forwarded-proto").rpartition(",")[2].strip().lower()
                if scheme in ("http", "https"):
                    scope["scheme"] = scheme
        await self.application(scope, receive, send)


def _header(scope: Any, name: bytes) -> str:
    """All values of a header, joined in order."""
    values = [value for key, value in scope["headers"] if key.lower() == name]
    return b",".join(values).decode("latin-1")
