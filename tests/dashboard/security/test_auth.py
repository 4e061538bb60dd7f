"""Signing in and out, and the first administrator."""

from __future__ import annotations

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
def test_the_first_visitor_without_the_token_is_refused(client: Client, token: str) -> None:
    answer = client.post("/setup", FIRST | {"token": token})
    assert answer.status_code == 422
    assert not User.objects.exists()
    assert TOKEN not in answer.content.decode().replace(f'value="{token}"', "")


def test_the_address_that_serve_prints_fills_the_token_in(client: Client) -> None:
    assert f'value="{TOKEN}"' in client.get(f"/setup?token={TOKEN}").content.decode()


def test_the_token_is_made_once_and_only_for_the_server(
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
    answer = Client().post("/setup", FIRST | {"token": token})
    assert answer.status_code == 302
    assert not (tmp_path / "setup_token").exists()
    with pytest.raises(CommandError):
        call_command("setup_token")


def test_without_any_user_the_sign_in_page_leads_to_the_first_administrator(client: Client) -> None:
    assert client.get("/", follow=True).redirect_chain[-1][0] == "/setup"
    answer = client.post("/setup", FIRST, follow=True)
    assert answer.redirect_chain == [("/", 302)]
    ada = User.objects.get()
    assert ada.is_superuser
    assert ada.is_staff
    assert list(ada.groups.values_list("name", flat=True)) == ["admin"]


def test_a_weak_first_password_is_refused_at_its_field(client: Client) -> None:
    answer = client.post("/setup", FIRST | {"password1": "12345", "password2": "12345"})
    assert answer.status_code == 422
    assert not User.objects.exists()
    assert 'value="ada"' in answer.content.decode()


def test_once_somebody_exists_nobody_is_made_administrator(client: Client) -> None:
    seed.user("vera", "viewer")
    assert client.post("/setup", FIRST)["Location"] == "/login"
    assert User.objects.count() == 1


def test_of_two_first_administrators_one_wins() -> None:
    forms = [FirstAdministratorForm(FIRST), FirstAdministratorForm(FIRST | {"username": "eve"})]
    assert all(form.is_valid() for form in forms)
    made = [form.save_if_first() for form in forms]
    assert [user.username if user else None for user in made] == ["ada", None]
    assert User.objects.count() == 1


def test_wrong_password_says_so_and_keeps_the_name(client: Client) -> None:
    seed.user("olga", "operator")
    answer = client.post("/login", {"username": "olga", "password": "wrong"})
    page = answer.content.decode()
    assert 'role="alert"' in page
    assert 'value="olga"' in page


def test_sign_in_leads_back_and_never_to_another_site(client: Client) -> None:
    seed.user("olga", "operator")
    sent = {"username": "olga", "password": "correct horse battery"}
    assert client.post("/login", sent | {"next": "/runs/new"})["Location"] == "/runs/new"
    assert Client().post("/login", sent | {"next": "https://evil.example/"})["Location"] == "/"


def test_sign_out_is_by_post_alone(client: Client) -> None:
    client.force_login(seed.user("olga", "operator"))
    assert client.get("/logout").status_code == 405
    client.post("/logout")
    assert client.get("/").status_code == 302
