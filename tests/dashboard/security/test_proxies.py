"""The client address: the right-most hop that is not a trusted proxy."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from django.core.cache import cache

from dashboard.checks import check_deployment, check_validity
from dashboard.security import throttle
from dashboard.security.proxies import TrustedProxies, client_address, parse_networks
from tests.browser import seed
from tests.dashboard.security.test_account_password import sign_in

TRUSTED = parse_networks(["10.0.0.0/8", "::1"])


@pytest.mark.parametrize(
    ("peer", "header", "client"),
    [
        ("203.0.113.9", "198.51.100.1", "203.0.113.9"),  # not through a proxy
        ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "1.1.1.1, 198.51.100.1", "198.51.100.1"),  # the client forged 1.1.1.1
        ("10.0.0.1", "1.1.1.1, 198.51.100.1, 10.9.9.9", "198.51.100.1"),
        ("10.0.0.1", "198.51.100.1:4711", "198.51.100.1"),
        ("::1", "[2001:db8::1]:80", "2001:db8::1"),
        ("::ffff:10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "1.1.1.1, unknown", "10.0.0.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.2, 10.0.0.3", "10.0.0.2"),
    ],
)
def test_client_address(peer: str, header: str, client: str) -> None:
    assert client_address(peer, header, TRUSTED) == client


def through(peer: str, *headers: tuple[bytes, bytes], trusted: Any = TRUSTED) -> dict[str, Any]:
    """The scope that the application receives."""
    seen: dict[str, Any] = {}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)

    scope = {"type": "http", "client": (peer, 5), "scheme": "http", "headers": list(headers)}
    asyncio.run(TrustedProxies(application, trusted)(scope, None, None))
    return seen


def test_headers_of_untrusted_clients_are_ignored() -> None:
    sent = [(b"x-forwarded-for", b"1.1.1.1"), (b"x-forwarded-proto", b"https")]
    scope = through("203.0.113.9", *sent)
    assert (scope["client"][0], scope["scheme"]) == ("203.0.113.9", "http")
    scope = through("10.0.0.1", *sent, trusted=())
    assert (scope["client"][0], scope["scheme"]) == ("10.0.0.1", "http")


def test_repeated_headers_are_joined() -> None:
    sent = [(b"x-forwarded-for", b"1.1.1.1"), (b"x-forwarded-for", b"198.51.100.1")]
    assert through("10.0.0.1", *sent, (b"x-forwarded-proto", b"https"))["client"][0] == (
        "198.51.100.1"
    )


def test_invalid_proxy_settings_are_reported(settings: Any) -> None:
    settings.TRUSTED_PROXIES = ["proxy.example"]
    assert "archipelago.E006" in [message.id for message in check_validity(None)]
    settings.TRUSTED_PROXIES = ["0.0.0.0/0"]
    assert "archipelago.E110" in [message.id for message in check_deployment(None)]


@pytest.mark.django_db
def test_forged_forwarded_for_does_not_bypass_the_throttle() -> None:
    """The proxy appends the real address to the header of the client."""
    cache.clear()
    seed.user("olga", "operator")
    statuses = []
    for number in range(throttle.PER_NAME + 3):
        header = f"192.0.2.{number}, 198.51.100.7"
        statuses.append(sign_in("wrong", address=client_address("10.0.0.1", header, TRUSTED)))
    assert [response.status_code for response in statuses[-3:]] == [429] * 3


@pytest.mark.django_db
def test_attempts_are_limited_per_account(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache.clear()
    monkeypatch.setattr(throttle, "PER_ACCOUNT", 5)
    seed.user("olga", "operator")
    assert sign_in("correct horse battery", address="198.51.100.1").status_code == 302
    guesses = [sign_in("wrong", address=f"192.0.2.{n}").status_code for n in range(7)]
    assert guesses == [200] * 5 + [429] * 2
    # The owner is not locked out on a network of an earlier sign-in.
    assert sign_in("correct horse battery", address="198.51.100.1").status_code == 302
    assert sign_in("correct horse battery", address="192.0.2.99").status_code == 429


@pytest.mark.django_db
def test_attempts_are_limited_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.clear()
    monkeypatch.setattr(throttle, "IN_ALL", 4)
    seed.user("olga", "operator")
    answers = [sign_in("wrong", name=f"n{n}", address=f"192.0.2.{n}").status_code for n in range(6)]
    assert answers == [200] * 4 + [429] * 2


@pytest.mark.django_db
def test_an_ipv6_network_counts_as_one_client() -> None:
    cache.clear()
    for number in range(throttle.PER_NAME):
        assert not throttle.refused("olga", f"2001:db8::{number + 1:x}")
    assert throttle.refused("olga", "2001:db8::ffff")
    assert not throttle.refused("olga", "2001:db8:0:1::1")


@pytest.mark.django_db
def test_concurrent_attempts_are_counted_before_the_password_check() -> None:
    """An attempt counts when it starts, not when it fails."""
    cache.clear()
    started = [throttle.refused("olga", "192.0.2.1") for _ in range(throttle.PER_NAME + 1)]
    assert list(itertools.compress(started, started)) == [True]
