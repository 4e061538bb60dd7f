"""A new server: its first administrator, the first page, and all screens without data."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.accessibility import Contrast
from tests.browser.conftest import opened_window, running_site
from tests.browser.test_axe import WIDTHS, examine

pytestmark = [
    pytest.mark.browser,
    pytest.mark.weight(8),
    pytest.mark.slow,
    pytest.mark.usefixtures("own_database"),
]


EMPTY = {
    "runs": "/",
    "new": "/runs/new",
    "compare": "/compare",
    "users": "/settings/people",
    "fleet": "/fleet",
    "spend": "/spend",
    "sweeps": "/sweeps",
}


def test_setup_leads_to_the_prefilled_form_and_screens_without_data(
    browser: Browser, tmp_path: Path, valkey: str, contrast: Contrast
) -> None:
    with (
        running_site(tmp_path, valkey) as site,
        opened_window(browser, site, "first-start") as window,
    ):
        page = window.open("/", user=None)
        expect(page.get_by_role("heading", level=1)).to_have_text("Welcome to Archipelago")
        expect(page.get_by_label("Setup token")).to_be_empty()
        token = next(tmp_path.rglob("setup_token")).read_text()
        page.goto(f"{site.url}/setup?token={token}")
        expect(page.get_by_label("Setup token")).to_have_value(token)
        problems = examine(window, page, "first-start", contrast)
        assert not problems, "\n".join(problems)
        page.get_by_label("Username").fill("ada")
        page.get_by_label("Password", exact=True).fill("lagoon-and-reef")
        page.get_by_label("Repeat password").fill("lagoon-and-reef")
        page.get_by_role("button", name="Create administrator").click()
        expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
        window.shoot(page, "no-runs")
        page.get_by_role("link", name="Local demo").click()
        expect(page.get_by_label("Name", exact=True)).to_have_value("Local demo")
        # Without its style sheet the page also shows the bar of narrow screens.
        page.wait_for_load_state()
        expect(page.get_by_role("button", name="Launch")).to_be_enabled()
        for name, path in EMPTY.items():
            page.emulate_media(color_scheme="light")
            page.set_viewport_size({"width": WIDTHS[0], "height": 900})
            page.goto(path)
            problems = examine(window, page, f"empty-{name}", contrast)
            assert not problems, "\n".join(problems)
