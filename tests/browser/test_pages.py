"""Every page at several widths, in light and dark: nothing overflows, and controls have names."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Site, Window, overflow

pytestmark = pytest.mark.browser

LONG = "A run with a very long name that shows how the page wraps and truncates it"


@pytest.fixture(scope="module")
def runs(site: Site) -> dict[str, str]:
    return {
        "demo": site.seed("name='Local demo', reason='all 4 replicas live'"),
        "long": site.seed(
            f"name={LONG!r}, state='degraded', committed=240, total_rounds=400, sync_every=10,"
            "replicas=24, reason='live 23 < target 24: replica 23 is lost'"
        ),
        "new": site.seed("name='Just launched', state='provisioning', committed=0"),
        "done": site.seed("name='Finished', state='succeeded', committed=20, age_s=9000"),
        "failed": site.seed(
            "name='Bad bucket', state='failed', committed=0, age_s=7000,"
            "reason='cannot write in s3://missing/here: AccessDenied'"
        ),
    }


PAGES = {
    "list": "/",
    "new": "/runs/new",
    "demo": "/runs/{demo}/",
    "rounds": "/runs/{demo}/?tab=rounds&round=5",
    "replicas": "/runs/{demo}/?tab=replicas",
    "logs": "/runs/{demo}/?tab=logs",
    "settings": "/runs/{demo}/?tab=settings",
    "activity": "/runs/{demo}/?tab=activity",
    "long": "/runs/{long}/",
    "long-rounds": "/runs/{long}/?tab=rounds&round=239",
    "launching": "/runs/{new}/",
    "done": "/runs/{done}/",
    "failed": "/runs/{failed}/",
    "not-found": "/nowhere",
}
WIDTHS = {"list": (1440, 800), "demo": (1440, 800, 2560)}
"""Widths of pages; the others have the first one only, and all of them also that of a phone."""
PHONE = 360


@pytest.mark.parametrize("name", PAGES)
def test_page(window: Window, runs: dict[str, str], name: str) -> None:
    wide, *others = WIDTHS.get(name, (1440,))
    for width in (wide, PHONE):
        page = window.open(PAGES[name].format(**runs), width=width)
        page.wait_for_load_state("load")
        if "/runs/{" in PAGES[name]:
            expect(page.locator('[data-s="bytes"]')).not_to_have_text("–")
        look_at(window, page, f"{name}-{width}", schemes=width == wide or name == "list")
        for resized in others if width == wide else ():
            page.set_viewport_size({"width": resized, "height": 900})
            look_at(window, page, f"{name}-{resized}", schemes=False)
        page.context.close()
    if name == "not-found":
        window.errors[:] = [e for e in window.errors if "404" not in e]


def look_at(window: Window, page: Page, name: str, *, schemes: bool) -> None:
    """Check the width of a page and the names of its controls, in light and with ``schemes`` in
    dark."""
    for scheme in ("light", "dark") if schemes else ("light",):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        if window.screenshots:
            page.wait_for_timeout(150)  # let canvases paint before the picture is taken
        window.shoot(page, f"page-{name}-{scheme}")
        wide = overflow(page)
        assert wide <= 0, f"{name}: {wide} pixels too wide"
    nameless = re.findall(
        r"^\s*- (?:button|link|textbox|combobox|slider|radio|spinbutton)(?: \[[^\]]*\])*:?$",
        page.locator("body").aria_snapshot(),
        re.M,
    )
    assert nameless == []


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
