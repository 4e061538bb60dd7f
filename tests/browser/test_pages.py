"""Pages without a sign-in or a permission."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Window

pytestmark = pytest.mark.browser


def test_sign_in(window: Window) -> None:
    page = window.open("/login", user=None)
    window.shoot(page, "sign-in")
    page.get_by_label("Username").fill("olga")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("correct username and password")


def test_page_without_permission(window: Window) -> None:
    page = window.open("/runs/new", user="vera")
    expect(page.get_by_role("heading", level=1)).to_have_text("Your role does not allow this")
    window.errors[:] = [e for e in window.errors if "403" not in e]
