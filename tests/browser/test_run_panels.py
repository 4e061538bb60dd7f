"""The run page's rail, drawer, panels and activity."""

from __future__ import annotations

import re
import uuid

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Site, Window, eventually, expect_address, overflow

pytestmark = pytest.mark.browser


@pytest.fixture
def page(window: Window, site: Site) -> Page:
    pk = f"0{uuid.uuid4().hex[1:]}"  # a 0 at the start of the address is no placeholder
    run = site.seed(
        f"pk=seed.uuid.UUID('{pk}'), name='Panels', committed=20, replicas=4, total_rounds=40"
    )
    page = window.open(f"/runs/{run}/")
    expect(page.locator('[data-plot="loss"] [data-legend] button')).not_to_have_count(0)
    return page


def panel(page: Page, name: str) -> dict[str, float]:
    box = page.locator(f'[data-plot="{name}"]').bounding_box()
    assert box is not None
    return dict(box)


def expect_above(page: Page, upper: str, lower: str) -> None:
    def distance() -> float:
        return panel(page, lower)["y"] - panel(page, upper)["y"]

    eventually(page, distance, lambda pixels: pixels > 0)


def expect_above_or_left(page: Page, first: str, second: str) -> None:
    def follows() -> bool:
        a, b = panel(page, first), panel(page, second)
        return (a["y"], a["x"]) < (b["y"], b["x"])

    eventually(page, follows, bool)


def expect_full_width(page: Page, name: str) -> None:
    eventually(page, lambda: panel(page, name)["width"], lambda width: width > 1400)


def test_panels_are_arranged_by_keyboard_and_kept_in_the_address(page: Page) -> None:
    narrow = panel(page, "norm")["width"]
    page.get_by_role("button", name="Resize Pseudo-gradient norm").focus()
    page.keyboard.press("Enter")
    eventually(page, lambda: panel(page, "norm")["width"], lambda width: width > 1.8 * narrow)
    page.get_by_role("button", name="Pin Outer update norm to the top").focus()
    page.keyboard.press("Enter")
    expect_above(page, "update", "loss")
    page.get_by_role("button", name="Remove Goodput").focus()
    page.keyboard.press("Enter")
    expect(page.locator('[data-plot="goodput"]')).to_have_count(0)
    page.get_by_role("button", name="Add panel").click()
    dialog = page.get_by_role("dialog", name="Add a panel")
    expect(dialog.get_by_role("button", name="Goodput")).to_be_visible()
    dialog.get_by_role("searchbox").fill("tokens")
    dialog.get_by_role("button", name="tokens_per_s").click()
    added = page.locator('[data-plot="m:tokens_per_s"]')
    expect(added.locator("canvas").first).to_be_visible()
    page.get_by_role("button", name="Show Loss in full screen").focus()
    page.keyboard.press("Enter")
    expect_full_width(page, "loss")
    page.reload()
    expect_full_width(page, "loss")
    page.keyboard.press("Escape")
    expect(page.locator("[data-full]")).to_have_count(0)
    expect(added.locator("canvas").first).to_be_visible()
    expect(page.locator('[data-plot="goodput"]')).to_have_count(0)
    expect_above(page, "update", "loss")


@pytest.mark.slow
def test_a_saved_view_restores_the_layout_on_another_run(page: Page, site: Site) -> None:
    page.get_by_role("button", name="Move Goodput earlier").focus()
    page.keyboard.press("Enter")
    expect_above_or_left(page, "goodput", "speed")
    expect(page.get_by_role("button", name="Move Goodput earlier")).to_be_focused()
    page.get_by_role("button", name="Pin Outer update norm to the top").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_role("button", name="log y").click()
    expect_address(page, "log=y")
    overview = page.get_by_role("region", name="Overview")
    menu = overview.get_by_text("Views", exact=True)
    menu.click()
    overview.get_by_label("Save current panels as").fill("Health")
    overview.get_by_role("button", name="Save view").click()
    expect(page.get_by_text("View Health saved.")).to_be_visible()
    expect_above(page, "update", "loss")
    other = site.seed("name='Other panels', committed=5")
    page.goto(f"/runs/{other}/")
    menu.click()
    link = overview.get_by_role("link", name="Health")
    expect(link).not_to_have_attribute("aria-current", "true")
    link.click()
    expect(page.get_by_role("button", name="log y")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("button", name="Tokens", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    expect_above(page, "update", "loss")
    expect_above_or_left(page, "goodput", "speed")
    menu.click()
    expect(link).to_have_attribute("aria-current", "true")
    overview.get_by_role("link", name="Usual panels").click()
    expect_above(page, "loss", "update")


def test_a_filter_changed_while_the_script_of_its_tab_loads_applies(
    window: Window, site: Site
) -> None:
    run = site.seed("name='Filters', committed=3")
    page = window.open("/planner")
    held: list[Route] = []
    page.route(re.compile(r"/(activity|logs)-\w+\.js"), lambda route: held.append(route))
    page.goto(f"/runs/{run}/?tab=activity&level=error&text=nothing")
    activity = page.get_by_role("search", name="Filter the activity")
    eventually(page, lambda: len(held), lambda scripts: scripts == 1)
    activity.get_by_label("Search").fill("")
    activity.locator("[name=level]").select_option("warning")
    held.pop().continue_()
    expect_address(page, "level=warning")
    expect(page).not_to_have_url(re.compile("text="))
    expect(activity.get_by_label("Search")).to_have_value("")
    page.goto(f"/runs/{run}/?tab=logs&level=error&q=nothing")
    eventually(page, lambda: len(held), lambda scripts: scripts == 1)
    logs = page.locator("[data-logs-card]")
    expect(logs.get_by_label("Search")).to_have_value("nothing")
    logs.get_by_label("Search").fill("")
    held.pop().continue_()
    expect(page.locator("[data-follow]")).not_to_be_empty()
    expect_address(page, "level=error")
    expect(page).not_to_have_url(re.compile("q="))
    expect(logs.locator("[data-level]").first).to_have_value("error")


def test_a_replica_is_highlighted_and_downloads_follow_the_filters(page: Page) -> None:
    page.get_by_role("group", name="Highlighted replicas").get_by_role(
        "button", name="Replica 2"
    ).click()
    expect_address(page, "replicas=2")
    box = page.locator('[data-plot="loss"] .u-over').bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 40)
    tip = page.locator('[data-plot="loss"] .chart-tip')
    expect(tip).to_contain_text("Replica 2")
    expect(tip).not_to_contain_text("Replica 1")
    values = [text for text in tip.locator("output").all_inner_texts() if "–" not in text]
    assert values == sorted(values, key=float, reverse=True)
    strip = page.locator("[data-strip] canvas").bounding_box()
    assert strip is not None
    assert strip["x"] <= box["x"]
    assert strip["x"] + strip["width"] >= box["x"] + box["width"]
    page.get_by_role("link", name="Activity", exact=True).click()
    rows = page.locator("[data-activity] .activity > li")
    expect(rows).not_to_have_count(0)
    everything = rows.count()
    page.get_by_label("Level").and_(page.locator("[name=level]")).select_option("warning")
    expect(rows.filter(has_not_text="void")).to_have_count(0)
    eventually(page, rows.count, lambda number: number < everything)
    expect_address(page, "level=warning")
    page.get_by_role("link", name="Logs", exact=True).click()
    page.locator("[data-logs-card] [data-level]").first.select_option("error")
    expect(page.get_by_role("link", name="Download .txt")).to_have_attribute(
        "href", re.compile(r"logs\.txt\?level=error$")
    )


MISSING = {
    "drawer=replica-99": "This run has no replica 99.",
    "round=999": "This run has no round 999.",
    "round=last": "The address names no replica, round or event.",
    "drawer=event-0": "This run has no event 0.",
}
"""Address -> text of the drawer."""
GO = """(query) => {
    history.pushState(null, "", `?${query}`);
    dispatchEvent(new PopStateEvent("popstate"));
}"""
COVERED = """() => document.querySelector(".events-card").getBoundingClientRect().right
    - document.querySelector("[data-drawer]").getBoundingClientRect().left"""


def test_the_drawer_is_in_the_address_and_back_closes_it(page: Page, window: Window) -> None:
    page.evaluate("scrollTo(0, 300)")
    before = page.evaluate("scrollY")
    link = page.locator('[data-rail-replicas] a[data-drawer-link="replica-3"]')
    link.focus()
    page.keyboard.press("Enter")
    drawer = page.get_by_role("complementary", name="Details")
    expect(drawer.get_by_role("heading", name="Replica 3")).to_be_visible()
    expect(drawer).to_be_focused()
    expect(page).to_have_url(re.compile("drawer=replica-3$"))
    assert page.evaluate("scrollY") == before
    for width in (1024, 1280, 1366, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        eventually(page, lambda: page.evaluate(COVERED), lambda pixels: pixels < 0)
        assert overflow(page) <= 0
    page.go_back()
    expect(drawer).to_be_hidden()
    expect(link).to_be_focused()
    link.click()
    expect(drawer.get_by_role("heading", name="Replica 3")).to_be_visible()
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    expect(page).not_to_have_url(re.compile("drawer="))
    page.goto(page.url + "?drawer=replica-1")
    expect(drawer.get_by_role("heading", name="Replica 1")).to_be_visible()
    page.get_by_label("Close details").click()
    expect(drawer).to_be_hidden()
    page.locator(".event-link", has_text="all replicas live").click()
    expect(drawer.locator(".failure-message")).to_have_text("all replicas live")
    expect(drawer.locator(".drawer-facts")).to_contain_text("provisioning")
    expect_address(page, "drawer=event-")
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    toggle = page.get_by_role("button", name="Findings, replicas and notes")
    toggle.click()
    expect(page.locator("#rail")).to_be_hidden()
    page.reload()
    expect(page.locator("#rail")).to_be_hidden()
    for query, text in MISSING.items():
        page.evaluate(GO, query)
        expect(drawer.get_by_text(text)).to_be_visible()
    window.errors[:] = [error for error in window.errors if "404" not in error]
    expect(toggle).to_have_attribute("aria-expanded", "false")
