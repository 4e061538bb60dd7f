"""The run page's rail, drawer, panels and activity."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Site, Window, eventually, expect_address

pytestmark = pytest.mark.browser


@pytest.fixture
def page(window: Window, site: Site) -> Page:
    run = site.seed("name='Panels', committed=20, replicas=4, total_rounds=40")
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


def test_a_replica_is_highlighted_in_all_charts(page: Page) -> None:
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


def test_the_drawer_is_in_the_address_and_back_closes_it(page: Page) -> None:
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
    toggle = page.get_by_role("button", name="Findings, replicas and notes")
    toggle.click()
    expect(page.locator("#rail")).to_be_hidden()
    page.reload()
    expect(page.locator("#rail")).to_be_hidden()
    expect(toggle).to_have_attribute("aria-expanded", "false")


def test_activity_and_log_downloads_follow_the_filters(page: Page) -> None:
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
