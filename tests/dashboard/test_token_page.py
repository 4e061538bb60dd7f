"""API tokens of a user: the page, and their validity."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from runs.actions import api_tokens
from runs.models import ApiToken
from tests.browser import seed
from tests.dashboard.page_harness import client_for

pytestmark = pytest.mark.django_db
FORM = {"name": "laptop", "scope": "operate", "days": "90"}


@pytest.fixture
def owner() -> Any:
    return seed.user("owner", "operator")


def text_of(response: Any) -> str:
    page = response.content.decode()
    return str(page.split('id="token-text"')[1].split('value="')[1].split('"')[0])


def test_tokens_of_other_users_are_hidden(owner: Any) -> None:
    token, _ = api_tokens.issue(owner, name="laptop", scopes=["read"])
    for kind in ("stranger", "admin", "viewer"):
        client = client_for(kind, owner)
        assert "laptop" not in client.get("/settings/tokens").content.decode()
        assert client.post(f"/settings/tokens/{token.pk}/revoke").status_code == 404
    anonymous = Client()
    for response in (
        anonymous.get("/settings/tokens"),
        anonymous.post(f"/settings/tokens/{token.pk}/revoke"),
    ):
        assert response.status_code == 302
        assert response["Location"].startswith("/login")
    assert api_tokens.tokens_of(owner).count() == 1


def test_a_token_is_shown_once_and_stored_as_a_hash(owner: Any) -> None:
    client = client_for("owner", owner)
    response = client.post("/settings/tokens", FORM)
    assert response["Cache-Control"].startswith("max-age=0")
    text = text_of(response)
    token = ApiToken.objects.get()
    assert text.startswith("arch_")
    assert token.scopes == ["read", "operate"]
    assert text not in str(ApiToken.objects.values().get())
    assert token.digest == api_tokens.digest_of(text)
    assert text not in client.get("/settings/tokens").content.decode()
    assert client.get("/api/me", headers={"Authorization": f"Bearer {text}"}).status_code == 200
    page = client.get("/settings/tokens").content.decode()
    assert all(f"{word} <time datetime=" in page for word in ("created", "used", "expires"))


def test_a_revoked_token_is_rejected(owner: Any) -> None:
    client = client_for("owner", owner)
    headers = {"Authorization": f"Bearer {text_of(client.post('/settings/tokens', FORM))}"}
    page = client.post(f"/settings/tokens/{ApiToken.objects.get().pk}/revoke", follow=True)
    assert "Token laptop revoked" in page.content.decode()
    assert Client().get("/api/me", headers=headers).status_code == 401


def test_an_expired_token_is_rejected(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = api_tokens.issue(owner, name="laptop", scopes=["read"], days=30)
    now = timezone.now()
    assert api_tokens.find(text, now=now + timedelta(days=29)) is not None
    assert api_tokens.find(text, now=now + timedelta(days=31)) is None


def test_the_token_of_a_deactivated_user_is_rejected(owner: Any) -> None:
    _, text = api_tokens.issue(owner, name="laptop", scopes=["read"])
    owner.is_active = False
    owner.save()
    assert api_tokens.find(text, now=timezone.now()) is None


def test_the_last_use_is_updated_once_a_minute(owner: Any) -> None:
    token, text = api_tokens.issue(owner, name="laptop", scopes=["read"])
    now = timezone.now()
    for after_s, expected_s in ((0, 0), (59, 0), (61, 61)):
        api_tokens.find(text, now=now + timedelta(seconds=after_s))
        token.refresh_from_db()
        assert token.last_used_at == now + timedelta(seconds=expected_s)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": " "}, "This field is required"),
        ({"name": "x" * 81}, "at most 80 characters"),
        ({"scope": "root"}, "Select a valid choice"),
        ({"days": "0"}, "Select a valid choice"),
    ],
)
def test_errors_are_reported(owner: Any, change: dict[str, str], why: str) -> None:
    response = client_for("owner", owner).post("/settings/tokens", FORM | change)
    assert response.status_code == 422
    assert why in response.content.decode()
    assert not ApiToken.objects.exists()


def test_the_number_of_tokens_is_limited(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_tokens, "PER_PERSON", 1)
    client = client_for("owner", owner)
    assert client.post("/settings/tokens", FORM).status_code == 200
    response = client.post("/settings/tokens", FORM)
    assert response.status_code == 422
    assert "Expected at most 1 tokens" in response.content.decode()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"scopes": []}, "expected scopes of read, operate"),
        ({"scopes": ["all"]}, r"found \['all'\]"),
        ({"days": 0}, "expected 1 to 3650 days, found 0"),
        ({"name": ""}, "expected a name"),
    ],
)
def test_the_action_validates_its_input(owner: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        api_tokens.issue(owner, **{"name": "x", "scopes": ["read"], **options})


def test_the_number_of_queries_is_constant(owner: Any, django_assert_max_num_queries: Any) -> None:
    client = client_for("owner", owner)
    for number in range(20):
        api_tokens.issue(owner, name=f"token {number}", scopes=["read"])
    with django_assert_max_num_queries(7):
        client.get("/settings/tokens")
