"""Signing in and out, and the first administrator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client

from dashboard.forms import FirstAdministratorForm
from dashboard.security import setup_token
from tests.browser import seed

pytestmark = pytest.mark.django_db

TOKEN = "the-set-up-token"
FIRST = {
    "token": TOKEN,
    "username": "ada",
    "password1": "lagoon-and-reef",
    "password2": "lagoon-and-reef",
}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHIPELAGO_SETUP_TOKEN", TOKEN)


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], "ключ"])
def test_setup_without_the_token_is_rejected(client: Client, token: str) -> None:
    response = client.post("/setup", FIRST | {"token": token})
    assert response.status_code == 422
    assert not User.objects.exists()
    assert TOKEN not in response.content.decode().replace(f'value="{token}"', "")


def test_the_setup_url_prefills_the_token(client: Client) -> None:
    assert f'value="{TOKEN}"' in client.get(f"/setup?token={TOKEN}").content.decode()


def test_the_setup_token_is_created_once_with_private_permissions(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("ARCHIPELAGO_SETUP_TOKEN")
    settings.VAR_DIR = tmp_path
    token = setup_token.setup_token()
    assert len(token) > 40
    assert setup_token.setup_token() == token
    assert (tmp_path / "setup_token").stat().st_mode & 0o777 == 0o600
    call_command("setup_token")
    assert capsys.readouterr().out.strip() == token
    response = Client().post("/setup", FIRST | {"token": token})
    assert response.status_code == 302
    assert not (tmp_path / "setup_token").exists()
    with pytest.raises(CommandError):
        call_command("setup_token")


def test_without_users_sign_in_redirects_to_setup(client: Client) -> None:
    assert client.get("/", follow=True).redirect_chain[-1][0] == "/setup"
    response = client.post("/setup", FIRST, follow=True)
    assert response.redirect_chain == [("/", 302)]
    ada = User.objects.get()
    assert ada.is_superuser
    assert ada.is_staff
    assert list(ada.groups.values_list("name", flat=True)) == ["admin"]


def test_a_weak_first_password_is_rejected_at_its_field(client: Client) -> None:
    response = client.post("/setup", FIRST | {"password1": "12345", "password2": "12345"})
    assert response.status_code == 422
    assert not User.objects.exists()
    assert 'value="ada"' in response.content.decode()


@pytest.mark.parametrize(
    ("change", "focused"),
    [
        ({"token": "wrong"}, "token"),
        ({"token": "", "username": ""}, "token"),
        ({"username": "not valid"}, "username"),
        ({"password2": "lagoon-and-sand"}, "password1"),
    ],
)
def test_the_first_field_to_correct_has_the_focus(
    client: Client, change: dict[str, str], focused: str
) -> None:
    page = client.post("/setup", FIRST | change).content.decode()
    assert re.findall(r'name="(\w+)"[^>]* autofocus', page) == [focused]


@pytest.mark.parametrize(("query", "focused"), [("", "token"), (f"?token={TOKEN}", "username")])
def test_the_first_empty_field_has_the_focus(client: Client, query: str, focused: str) -> None:
    page = client.get(f"/setup{query}").content.decode()
    assert re.findall(r'name="(\w+)"[^>]* autofocus', page) == [focused]


def test_setup_is_closed_once_a_user_exists(client: Client) -> None:
    seed.user("vera", "viewer")
    assert client.post("/setup", FIRST)["Location"] == "/login"
    assert User.objects.count() == 1


def test_of_two_concurrent_setups_one_succeeds() -> None:
    forms = [FirstAdministratorForm(FIRST), FirstAdministratorForm(FIRST | {"username": "eve"})]
    assert all(form.is_valid() for form in forms)
    created = [form.save_if_first() for form in forms]
    assert [user.username if user else None for user in created] == ["ada", None]
    assert User.objects.count() == 1


def test_a_wrong_password_shows_an_error_and_keeps_the_name(client: Client) -> None:
    seed.user("olga", "operator")
    response = client.post("/login", {"username": "olga", "password": "wrong"})
    page = response.content.decode()
    assert 'role="alert"' in page
    assert 'value="olga"' in page


def test_sign_in_redirects_back_but_never_to_another_site(client: Client) -> None:
    seed.user("olga", "operator")
    sent = {"username": "olga", "password": "correct horse battery"}
    assert client.post("/login", sent | {"next": "/runs/new"})["Location"] == "/runs/new"
    assert Client().post("/login", sent | {"next": "https://evil.example/"})["Location"] == "/"


def test_sign_out_requires_post(client: Client) -> None:
    client.force_login(seed.user("olga", "operator"))
    assert client.get("/logout").status_code == 405
    client.post("/logout")
    assert client.get("/").status_code == 302
