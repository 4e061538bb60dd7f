"""The theme of the pages: remembered in a cookie, and in the first byte of the next page."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from tests.browser import seed

pytestmark = pytest.mark.django_db


@pytest.fixture
def client(client: Client) -> Client:
    client.force_login(seed.user("vera", "viewer"))
    return client


def choose(client: Client, **values: str) -> Any:
    return client.post(reverse("theme"), values)


def test_the_theme_is_in_the_next_page(client: Client) -> None:
    assert "data-theme=" not in client.get("/fleet").content.decode().partition("<body")[0]
    response = choose(client, theme="dark", next="/fleet?state=computing")
    assert response["Location"] == "/fleet?state=computing"
    assert 'data-theme="dark"' in client.get("/fleet").content.decode()
    choose(client, theme="system")
    assert "data-theme=" not in client.get("/fleet").content.decode().partition("<body")[0]


def test_other_themes_and_other_sites_are_refused(client: Client) -> None:
    response = choose(client, theme="sepia")
    assert response.status_code == 400
    assert "Choose one of: system, light, dark" in response.content.decode()
    assert choose(client, theme="light", next="https://evil.example/")["Location"] == "/"
    client.cookies["theme"] = '"><script>'
    assert "<script>" not in client.get("/fleet").content.decode().partition("<body")[0][:200]


def test_the_administration_has_the_theme_of_the_pages(client: Client) -> None:
    client.force_login(seed.user("root", "admin"))
    choose(client, theme="dark", next="/admin/")
    page = client.get("/admin/").content.decode()
    assert "theme-dark" in page
    assert "theme.js" not in page
    assert page.count('name="theme" value=') == 3
