"""Signing in and out, and the first administrator."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client

from dashboard.forms import FirstAdministratorForm
from tests.browser import seed

pytestmark = pytest.mark.django_db

FIRST = {"username": "ada", "password1": "lagoon-and-reef", "password2": "lagoon-and-reef"}


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
