"""The heatmap of replicas and rounds: which part of it is in sight."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Site, Window, eventually

pytestmark = pytest.mark.browser

SCROLLER = '[data-heatmap="small"] .heat-scroll'
EXTENT = "element => [element.scrollLeft, element.clientWidth, element.scrollWidth]"


def at_the_end(heat: Locator, wider_than: int) -> int:
    """Wait until it is wider and shows its last columns; return its width."""

    def accept(extent: list[int]) -> bool:
        left, shown, width = extent
        return width > wider_than and width - shown - left < 4

    return int(eventually(heat.page, lambda: heat.evaluate(EXTENT), accept)[2])


def older_rounds(page: Page, first: int) -> None:
    """Leave the rounds below ``first`` out of the snapshot, as of a run with thousands."""
    page.route(
        re.compile("snapshot.json"),
        lambda route: route.fulfill(
            json=(body := route.fetch().json())
            | {"rounds": [row for row in body["rounds"] if row["number"] >= first]}
        ),
    )


def test_the_newest_rounds_stay_in_sight(window: Window, site: Site) -> None:
    """Numbers of two digits make room for themselves, older rounds arrive after the first drawing,
    and new rounds follow."""
    run = site.seed("name='Newest', committed=90, total_rounds=5000, replicas=12, sync_every=2")
    page = window.open("/")
    older_rounds(page, 30)
    page.goto(f"/runs/{run}/")
    heat = page.locator(SCROLLER)
    known = at_the_end(heat, 90 * 9)
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    site.publish(
        run,
        rounds=[
            {
                "number": 92,
                "state": "collecting",
                "contributors": 0,
                "mode": "",
                "reason": "",
                "outcomes": "0" * 12,
                "late": {},
                "reasons": {},
                "straggler": None,
                "fragment": 0,
            }
        ],
    )
    at_the_end(heat, known)
    window.shoot(page, "heatmap-newest", full=False)


def test_a_scrolled_heatmap_stays_where_it_is(window: Window, site: Site) -> None:
    run = site.seed("name='Kept', committed=90, total_rounds=5000, replicas=12, sync_every=2")
    page = window.open(f"/runs/{run}/")
    heat = page.locator(SCROLLER)
    known = at_the_end(heat, 90 * 9)
    heat.evaluate("element => element.scrollTo(90, 0)")
    page.set_viewport_size({"width": 1380, "height": 900})
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    assert heat.evaluate("element => [element.scrollLeft, element.scrollWidth]") == [90, known]
