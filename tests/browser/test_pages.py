"""Every page at several widths, in light and dark: nothing overflows, and controls have names."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

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
SIZES = [(1440, "light"), (1440, "dark"), (360, "light")]
MORE = {"list": [(800, "light"), (360, "dark")], "demo": [(800, "light"), (2560, "light")]}


@pytest.mark.parametrize("name", PAGES)
def test_page(window: Window, runs: dict[str, str], name: str) -> None:
    for width, scheme in SIZES + MORE.get(name, []):
        page = window.open(PAGES[name].format(**runs), width=width, scheme=scheme)
        page.wait_for_load_state("load")
        if "/runs/{" in PAGES[name]:
            expect(page.locator('[data-s="bytes"]')).not_to_have_text("–")
        page.wait_for_timeout(150)  # let canvases paint before the picture is taken
        window.shoot(page, f"page-{name}-{width}-{scheme}")
        wide = overflow(page)
        assert wide <= 0, f"{name} at {width}: {wide} pixels too wide"
        nameless = re.findall(
            r"^\s*- (?:button|link|textbox|combobox|slider|radio|spinbutton)(?: \[[^\]]*\])*:?$",
            page.locator("body").aria_snapshot(),
            re.M,
        )
        assert nameless == []
        page.context.close()
    if name == "not-found":
        window.errors[:] = [e for e in window.errors if "404" not in e]


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
