"""The fleet: every live job, updated by the stream, filtered by the address."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import QUICK_TIMERS, Site, Window, eventually

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def filled(site: Site) -> None:
    site.python(
        "from tests.browser import seed_spend\n"
        "seed_spend.fleet(seed.user('fiona', 'operator'), seed.user('fred', 'operator'))"
    )


def live(window: Window, query: str = "", user: str = "vera") -> Page:
    page = window.open(f"/fleet{query}", user=user)
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    return page


WIDER = "(card) => card.querySelector('table').offsetWidth - card.clientWidth"


def trouble_of(page: Page) -> Locator:
    return page.get_by_role("region", name="Capacity and quota")


def test_backends_stay_in_their_card(window: Window, filled: None) -> None:
    page = window.open("/fleet", user="vera", width=360)
    card = page.get_by_role("region", name="Backends")
    expect(card).to_contain_text("unknown")
    for width in (1600, 1280, 1080, 1079, 390):
        page.set_viewport_size({"width": width, "height": 900})
        eventually(page, lambda: card.evaluate(WIDER), lambda pixels: pixels <= 0)


def test_a_viewer_sees_jobs_trouble_and_orphans(window: Window, filled: None) -> None:
    page = live(window, "?owner=fred")
    expect(trouble_of(page)).to_contain_text("InsufficientInstanceCapacity")
    page.goto("/fleet?owner=fiona")
    expect(page.locator("[data-job]", has_text="Priced")).to_have_count(3)
    expect(trouble_of(page)).to_contain_text("Action required")
    expect(page.get_by_role("region", name="Orphaned jobs")).to_contain_text("$8.00")
    page.goto("/fleet")
    orphans = page.get_by_role("region", name="Orphaned jobs")
    expect(orphans).to_contain_text("no attempt has its launch key")
    row = page.locator("[data-job]", has_text="fiona")  # others can have a run of this name, too
    row.get_by_role("link", name="Replica 2 of Priced").click()
    page.wait_for_url(re.compile(r"/runs/[0-9a-f-]+/replicas/2/$"))


def test_a_filter_goes_into_the_address(window: Window, filled: None) -> None:
    page = live(window)
    page.get_by_role("combobox", name="Owner").select_option("fiona")
    page.wait_for_url("**/fleet?owner=fiona")
    expect(page.locator("[data-job]")).to_have_count(13)
    page.get_by_role("combobox", name="Backend").select_option("sagemaker")
    page.wait_for_url("**/fleet?backend=sagemaker&owner=fiona")
    expect(page.locator("[data-job]")).to_have_count(2)
    page.get_by_role("link", name="Clear").click()
    page.wait_for_url("**/fleet")
    expect(page.get_by_role("combobox", name="Owner")).to_have_value("")


def test_jobs_appear_and_change_without_a_reload(window: Window, site: Site, filled: None) -> None:
    page = live(window)
    page.add_init_script("window.setInterval = () => 0")  # the page also refreshes now and then
    page.reload()
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    page.evaluate("window.kept = true")
    page.get_by_role("link", name="Modal").first.focus()
    run = site.seed("name='Fresh fleet', replicas=1, committed=1")
    site.python(
        "from runs.models import Run; from tests.browser import seed_spend\n"
        f"run = Run.objects.get(pk='{run}')\n"
        "seed_spend.history(run, days=1, price=7.5, backend='modal', tags=[])"
    )
    header = site.python(
        "import json; from runs.queries import selectors; from runs.models import Run\n"
        f"print(json.dumps(selectors.run_header(Run.objects.get(pk='{run}'))))"
    )
    site.publish(run, run=json.loads(header))
    expect(page.locator("[data-job]", has_text="Fresh fleet")).to_contain_text("$7.50/h")
    assert page.evaluate("window.kept")
    expect(page.get_by_role("link", name="Modal").first).to_be_focused()


def refresh(page: Page, site: Site) -> None:
    old = page.locator(".sums").element_handle()
    site.publish("none", run={"id": "none", "created_at": "2026-01-31T00:00:00Z"})
    old.wait_for_element_state("hidden")  # replaced


def test_a_refresh_keeps_what_has_the_focus_and_what_was_scrolled(
    window: Window, site: Site, filled: None
) -> None:
    page = live(window)
    page.add_init_script(QUICK_TIMERS)
    page.reload()
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    for selector in ("[data-job] time", "[data-job] a", ".pool-troubles"):
        place = page.locator(selector).first
        place.focus()
        refresh(page, site)
        expect(place).to_be_focused()
    page.evaluate(
        "() => { const low = new CSSStyleSheet();"
        "  low.replaceSync('.pool-troubles { max-height: 40px; overflow: auto; }');"
        "  document.adoptedStyleSheets = [low]; }"
    )
    # Found and scrolled in one task of the page: one that is replaced meanwhile has no scroll.
    page.evaluate("() => document.querySelector('.pool-troubles').scrollTo(0, 30)")
    refresh(page, site)
    assert page.evaluate("() => document.querySelector('.pool-troubles').scrollTop") == 30


def test_back_shows_the_filters_of_the_address(window: Window, filled: None) -> None:
    page = live(window)
    backend = page.get_by_role("combobox", name="Backend")
    backend.select_option("modal")
    page.wait_for_url("**/fleet?backend=modal")
    page.go_back()
    page.wait_for_url("**/fleet")
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    expect(backend).to_have_value("")


def test_without_a_script(window: Window, filled: None) -> None:
    page = window.open("/fleet?owner=fiona", user="vera", scripts=False)
    page.get_by_role("combobox", name="State").select_option("restarting")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("[data-job]")).to_have_count(1)
    page.goto("/spend")
    expect(page.locator(".bars rect").first).to_be_visible()
    page.get_by_text("Table", exact=True).click()
    expect(page.get_by_role("table", name="Spending by day and backend")).to_be_visible()
