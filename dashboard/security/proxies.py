"""The client of a request, behind proxies.

``X-Forwarded-For`` and ``X-Forwarded-Proto`` are used only if the request comes from an address in
``ARCHIPELAGO_TRUSTED_PROXIES``. Every proxy appends the address that it received the request from,
so entries are read from the right, and the first one that is no trusted proxy is the client: what
stands left of it was sent by the client and can be anything. uvicorn does not read these headers
(``--no-proxy-headers``): this is the only place that does.
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
"""Entries of the header that are read, from the right."""


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and networks such as ``10.0.0.0/8``; raises ``ValueError`` for anything else."""
    return tuple(ipaddress.ip_network(text.strip(), strict=False) for text in texts if text.strip())


def client_address(peer: str, forwarded_for: str, trusted: Sequence[Network]) -> str:
    """The right-most address that is no trusted proxy. ``peer`` opened the connection.

    An entry that is no address ends the walk: the hop that reported it is the client then.
    """
    nearest = peer
    if not _is_trusted(peer, trusted):
        return nearest
    for entry in reversed(forwarded_for[-HEADER_BYTES:].split(",")[-HOPS:]):
        found = _address(entry)
        if found is None:
            break
        nearest = str(found)
        if not _is_trusted(nearest, trusted):
            break
    return nearest


def _is_trusted(text: str, trusted: Sequence[Network]) -> bool:
    found = _address(text)
    return found is not None and any(found in network for network in trusted)


def _address(text: str) -> Address | None:
    """Of ``1.2.3.4``, ``1.2.3.4:80``, ``::1`` and ``[::1]:80``; IPv4-mapped as IPv4."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return mapped or found


class TrustedProxies:
    """ASGI: ``scope["client"]`` and ``scope["scheme"]`` are the client's."""

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
    """All headers of the name, in order, as one."""
    found = [value for key, value in scope["headers"] if key.lower() == name]
    return b",".join(found).decode("latin-1")
