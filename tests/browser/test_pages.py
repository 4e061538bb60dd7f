"""Pages without a sign-in or a permission."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Window

pytestmark = pytest.mark.browser


def test_sign_in(window: Window) -> None:
    page = window.open("/login", user=None)
    window.shoot(page, "sign-in")
    page.get_by_label("Username").fill("olga")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    assert "correct username and password" in page.get_by_role("alert").inner_text()


def test_page_without_permission(window: Window) -> None:
    page = window.open("/runs/new", user="vera")
    assert page.get_by_role("heading", level=1).inner_text() == "Your role does not allow this"
    window.errors[:] = [e for e in window.errors if "403" not in e]
