"""A new server: creation of the first administrator, then the first page."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import opened_window, running_site

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("own_database")]


def test_setup_leads_to_the_prefilled_form(browser: Browser, tmp_path: Path, valkey: str) -> None:
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
        window.shoot(page, "first-start")
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
