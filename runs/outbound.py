"""HTTP requests of the server to addresses that users enter: webhooks, and data over HTTP.

The host name is resolved once, all its addresses must be public, and the connection goes to a
checked address. A name that resolves differently a moment later (DNS rebinding) therefore has no
effect. Each redirect opens a new connection, which is checked in the same way. Other addresses are
reached only if ``ARCHIPELAGO_ALLOWED_ADDRESSES`` lists them or their host.

Not covered: HTTP proxies of the environment, which resolve names themselves, and the clients of
object stores, whose endpoints administrators set.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str], Iterable[str]]

MAX_REDIRECTS = 5
_ENDS_IN_IPV4 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::ffff:0:0:0/96"))
"""NAT64 and IPv4-translated (SIIT): the last 32 bits are the IPv4 address."""
_REFUSED = tuple(
    ipaddress.ip_network(text)
    for text in """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24
    192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 224.0.0.0/4 240.0.0.0/4 168.63.129.16/32
    ::/96 fc00::/7 fe80::/10 fec0::/10 ff00::/8 2001::/23 64:ff9b:1::/48 100::/64 100:0:0:1::/64
    3fff::/20 5f00::/16
    """.split()  # noqa: SIM905
)
"""Special-purpose networks of IANA (https://www.iana.org/assignments/iana-ipv4-special-registry,
https://www.iana.org/assignments/iana-ipv6-special-registry), and Azure's metadata address."""


class AddressRefused(OSError):
    """The address is not public and not allowed; the message explains how to allow it.

    An ``OSError``, so that a client reports it like any other failed connection.
    """


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet. Checks an embedded IPv4 address as well."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded(address)
        if embedded is not None:
            return is_public(embedded)
    if any(address in network for network in _REFUSED):
        return False
    return address.is_global and not address.is_multicast


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address behind a mapped, 6to4, NAT64 or translated IPv6 address."""
    if address.ipv4_mapped or address.sixtofour:
        return address.ipv4_mapped or address.sixtofour
    if any(address in network for network in _ENDS_IN_IPV4):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def resolve(host: str) -> list[str]:
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def addresses_of(host: str, *, resolver: Resolve | None = None) -> list[str]:
    """Resolve ``host`` to addresses that the server can connect to.

    Raises :class:`AddressRefused` if any address is not allowed: a name with one public and one
    private address is refused. Raises ``OSError`` if there is no address.
    """
    # The resolver also accepts 127.1 and 0x7f000001, so the check needs its results
    # (https://docs.python.org/3/library/socket.html).
    resolved = list((resolver or resolve)(host))
    allowed_hosts, networks = _allowed()
    if host.casefold().rstrip(".") in allowed_hosts:
        return resolved
    for text in resolved:
        address = ipaddress.ip_address(text.partition("%")[0])
        if not is_public(address) and not any(address in network for network in networks):
            raise AddressRefused(
                f"expected a public address, found {host}, which is not: an administrator of the "
                "server can allow it in ARCHIPELAGO_ALLOWED_ADDRESSES"
            )
    if not resolved:
        raise OSError(f"{host} has no address")
    return resolved


def _allowed() -> tuple[set[str], list[Any]]:
    """Host names and networks of the setting."""
    hosts, networks = set(), []
    for text in settings.ALLOWED_ADDRESSES:
        try:
            networks.append(ipaddress.ip_network(text, strict=False))
        except ValueError:
            hosts.add(text.casefold().rstrip("."))
    return hosts, networks


def check_url(url: str) -> None:
    """Raise ``ValueError`` for a URL that :func:`open_url` would refuse.

    A host that does not resolve now is accepted: each connection checks it again.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected http:// or https:// and a host, found {url[:80]!r}")
    # Parsers disagree about these: for some, the host of http://x\@1.1.1.1 is x.
    if "\\" in url or not url.isprintable() or " " in url:
        raise ValueError(f"expected an address without backslashes and spaces, found {url[:80]!r}")
    _ = parts.port  # a ValueError above 65535
    try:
        addresses_of(parts.hostname)
    except AddressRefused as error:
        raise ValueError(str(error)) from None
    except (OSError, UnicodeError):
        return


def _connect(address: tuple[str, int], timeout: Any = None, source: Any = None) -> socket.socket:
    """Replace ``socket.create_connection``: connect to a checked address."""
    host, port = address
    error: OSError | None = None
    for text in addresses_of(host):
        try:
            return socket.create_connection((text, port), timeout, source)
        except OSError as failed:
            error = failed
    assert error is not None
    raise error


class _Http(http.client.HTTPConnection):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._create_connection = _connect


class _Https(http.client.HTTPSConnection):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._create_connection = _connect


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, request: Any) -> Any:
        return self.do_open(_Http, request)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: Any) -> Any:
        return self.do_open(_Https, request)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Return a redirect like any other response that is not 2xx."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _FewRedirects(urllib.request.HTTPRedirectHandler):
    max_redirections = MAX_REDIRECTS
    max_repeats = 2


def _opener(redirects: urllib.request.HTTPRedirectHandler) -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()  # no handlers for file:, ftp:, data: and proxies
    for handler in (
        _HttpHandler(),
        _HttpsHandler(),
        redirects,
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


_without_redirects = _opener(_NoRedirect())
_with_redirects = _opener(_FewRedirects())


def open_url(request: urllib.request.Request, *, timeout_s: float, redirects: bool = False) -> Any:
    """Like ``urllib.request.urlopen``, but only for public and allowed addresses."""
    opener = _with_redirects if redirects else _without_redirects
    return opener.open(request, timeout=timeout_s)
