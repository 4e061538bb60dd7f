"""Addresses that users enter are contacted only if they are public or allowed."""

from __future__ import annotations

import ipaddress
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from runs import outbound
from runs.submit.bucket_check import check_data

PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "0.1.2.3",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "224.0.0.1",
    "255.255.255.255",
    "192.0.0.192",
    "198.18.0.1",
    "::",
    "::1",
    "fe80::1",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a00:1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::",
    "2001:db8::1",
    "2001::1",
    "192.0.2.1",
    "::ffff:0:127.0.0.1",
    "::ffff:0:a00:1",
    "64:ff9b:1:7f00:0:100:808:808",
    "5f00::1",
    "3fff::1",
    "100::1",
]
PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("text", PRIVATE)
def test_not_public(text: str) -> None:
    assert not outbound.is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_public(text: str) -> None:
    assert outbound.is_public(ipaddress.ip_address(text))


@pytest.fixture
def nothing_allowed(settings: Any) -> Any:
    settings.ALLOWED_ADDRESSES = []
    return settings


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "2130706433", "localhost", "::1"])
def test_every_spelling_of_loopback_is_refused(nothing_allowed: Any, host: str) -> None:
    with pytest.raises(outbound.AddressRefused, match="ARCHIPELAGO_ALLOWED_ADDRESSES"):
        outbound.addresses_of(host)


def test_a_name_with_one_private_address_is_refused(nothing_allowed: Any) -> None:
    with pytest.raises(outbound.AddressRefused):
        outbound.addresses_of("mixed.example", resolver=lambda host: ["8.8.8.8", "10.0.0.1"])


def test_networks_and_hosts_can_be_allowed(settings: Any) -> None:
    settings.ALLOWED_ADDRESSES = ["10.0.0.0/8", "Intranet.example"]
    assert outbound.addresses_of("a.example", resolver=lambda host: ["10.0.0.1"]) == ["10.0.0.1"]
    assert outbound.addresses_of("intranet.example.", resolver=lambda host: ["192.168.0.1"])
    with pytest.raises(outbound.AddressRefused):
        outbound.addresses_of("b.example", resolver=lambda host: ["192.168.0.1"])


class Server:
    """Counts requests, and redirects if it has a target."""

    def __init__(self) -> None:
        outer = self
        self.requests: list[str] = []
        self.location = ""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                self.send_response(302 if outer.location else 200)
                if outer.location:
                    self.send_header("Location", outer.location)
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"text")

            def log_message(self, *_: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}/data.txt"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_data_on_loopback_is_not_requested(nothing_allowed: Any, server: Server) -> None:
    [problem] = check_data(server.url)
    assert "an administrator of the server can allow it" in problem
    assert server.requests == []


def test_data_on_an_allowed_address_is_read(server: Server) -> None:
    assert check_data(server.url) == []
    assert server.requests == ["/data.txt"]


def test_a_redirect_to_a_refused_address_is_not_followed(settings: Any, server: Server) -> None:
    settings.ALLOWED_ADDRESSES = ["127.0.0.1"]
    server.location = f"http://127.0.0.2:{server.port}/secret"
    [problem] = check_data(server.url)
    assert "127.0.0.2" in problem
    assert server.requests == ["/data.txt"]


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://x/"])
def test_a_redirect_to_another_scheme_is_not_followed(server: Server, location: str) -> None:
    server.location = location
    [problem] = check_data(server.url)
    assert "root:" not in problem


def test_a_name_that_resolves_differently_later_is_connected_to_the_checked_address(
    settings: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the first answer is public, the second one loopback."""
    settings.ALLOWED_ADDRESSES = []
    answers = [["203.0.114.9"], ["127.0.0.1"]]
    connected: list[Any] = []

    def create_connection(address: Any, *_: Any) -> Any:
        connected.append(address)
        raise OSError("no route")

    monkeypatch.setattr(outbound, "resolve", lambda host: answers.pop(0))
    monkeypatch.setattr(socket, "create_connection", create_connection)
    request = urllib.request.Request(f"http://rebind.example:{server.port}/")
    with pytest.raises(urllib.error.URLError):
        outbound.open_url(request, timeout_s=1)
    assert connected == [("203.0.114.9", server.port)]
    assert server.requests == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "http://", "javascript:1"])
def test_urls_of_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected http"):
        outbound.check_url(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://8.8.8.8:99999/hook", "Port out of range"),
        ("https://10.0.0.1\\@8.8.8.8/", "without backslashes"),
        ("https://8.8.8.8\\.example/", "without backslashes"),
        ("https://8.8.8.8/\thook", "without backslashes"),
        ("https://8.8.8.8/a hook", "without backslashes"),
    ],
)
def test_an_address_that_clients_read_differently_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outbound.check_url(url)
