"""Changing one's own password, and limits on wrong passwords."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.cache import cache
from django.test import Client

from dashboard.security import throttle
from tests.browser import seed

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"
NEW = "staple of the horse"
CHANGE = {"old_password": PASSWORD, "new_password1": NEW, "new_password2": NEW}


@pytest.fixture(autouse=True)
def _no_failed_sign_ins() -> None:
    cache.clear()


@pytest.fixture(params=["alone", "broker"])
def counted(request: pytest.FixtureRequest, settings: Any) -> str:
    """Failures counted in the broker, and in the process without a broker."""
    if request.param == "broker":
        import redis

        settings.REDIS_URL = request.getfixturevalue("valkey")
        with redis.Redis.from_url(settings.REDIS_URL) as client:
            for key in client.scan_iter("archipelago:signin:*"):
                client.delete(key)
    return str(request.param)


def sign_in(password: str, *, name: str = "olga", address: str = "192.0.2.1") -> Any:
    sent = {"username": name, "password": password}
    return Client(REMOTE_ADDR=address).post("/login", sent)


def signed_in(name: str = "olga") -> Client:
    client = Client()
    assert client.login(username=name, password=PASSWORD)
    return client


def test_a_password_change_ends_other_sessions() -> None:
    seed.user("vera", "viewer")
    here, there = signed_in("vera"), signed_in("vera")
    assert there.get("/").status_code == 200
    response = here.post("/settings/password", CHANGE, follow=True)
    assert "signed out everywhere else" in response.content.decode()
    assert here.get("/").status_code == 200
    assert there.get("/")["Location"].startswith("/login")
    assert not Client().login(username="vera", password=PASSWORD)
    assert Client().login(username="vera", password=NEW)


def test_the_password_page_requires_sign_in() -> None:
    seed.user("vera", "viewer")
    assert Client().get("/settings/password")["Location"].startswith("/login")
    assert Client().post("/settings/password", CHANGE)["Location"].startswith("/login")


@pytest.mark.parametrize(
    ("sent", "result"),
    [
        ({"old_password": "wrong"}, "This is not your current password."),
        ({"new_password2": "another thing"}, "didn’t match"),
        ({"new_password1": "12345", "new_password2": "12345"}, "too short"),
    ],
)
def test_errors_are_shown_at_their_field(sent: dict[str, str], result: str) -> None:
    seed.user("vera", "viewer")
    client = signed_in("vera")
    response = client.post("/settings/password", CHANGE | sent)
    assert response.status_code == 422
    assert result in response.content.decode()
    assert Client().login(username="vera", password=PASSWORD)


def test_wrong_old_passwords_are_throttled(counted: str) -> None:
    seed.user("vera", "viewer")
    client = signed_in("vera")
    for _ in range(throttle.PER_NAME):
        client.post("/settings/password", CHANGE | {"old_password": "wrong"})
    assert client.post("/settings/password", CHANGE).status_code == 429
    assert Client().login(username="vera", password=PASSWORD)


def test_after_many_failures_no_password_is_checked(counted: str) -> None:
    seed.user("olga", "operator")
    for _ in range(throttle.PER_NAME):
        assert sign_in("wrong").status_code == 200
    response = sign_in(PASSWORD)
    assert response.status_code == 429
    assert "Too many wrong passwords" in response.content.decode()
    assert sign_in(PASSWORD, name="OLGA").status_code == 429
    # Other users are not locked out: sign-in from another address works.
    assert sign_in(PASSWORD, address="192.0.2.2").status_code == 302


def test_a_successful_sign_in_resets_the_count(counted: str) -> None:
    seed.user("olga", "operator")
    for _ in range(2):
        for _ in range(throttle.PER_NAME - 1):
            sign_in("wrong")
        assert sign_in(PASSWORD).status_code == 302


def test_attempts_are_limited_per_address(counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "PER_ADDRESS", 5)
    seed.user("olga", "operator")
    seed.user("mallory", "viewer")
    for number in range(5):
        sign_in("wrong", name=f"guess-{number}")
        if number == 2:
            assert sign_in(PASSWORD, name="mallory").status_code == 302
    assert sign_in(PASSWORD).status_code == 429


def test_a_count_expires(counted: str, settings: Any) -> None:
    if counted != "broker":
        return  # Django's cache expires the count of the process
    import redis

    throttle.refused("olga", "192.0.2.1")
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        left = [client.ttl(key) for key in client.scan_iter("archipelago:signin:*")]
    assert len(left) == 4
    assert all(0 < seconds <= throttle.WINDOW_S for seconds in left)


def test_the_admin_site_uses_the_same_sign_in_page() -> None:
    seed.user("olga", "operator")
    anonymous = Client().get("/admin/", follow=True)
    assert anonymous.redirect_chain[-1][0] == "/login?next=%2Fadmin%2F"
    response = signed_in().get("/admin/", follow=True)
    assert response.status_code == 403
    assert Client().post("/admin/login/", {"username": "olga", "password": "x"}).status_code == 302
