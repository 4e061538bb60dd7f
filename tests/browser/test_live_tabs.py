"""Tabs of one browser share one stream, and take it over from each other."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import Site, Window

pytestmark = pytest.mark.browser


@pytest.fixture
def runs(site: Site) -> tuple[str, str]:
    return site.seed("name='First', committed=3"), site.seed("name='Second', committed=3")


class Tabs:
    """Pages of one browser, and the streams that each has asked for."""

    def __init__(self, window: Window, path: str) -> None:
        self.asked: dict[Page, list[str]] = {}
        page = window.open("/planner")  # signs in; has no stream
        self.context: BrowserContext = page.context
        self.pages = [self._go(page, path)]

    def open(self, path: str) -> Page:
        self.pages.append(self._go(self.context.new_page(), path))
        return self.pages[-1]

    def _go(self, page: Page, path: str) -> Page:
        asked: list[str] = []
        self.asked[page] = asked
        page.on("request", lambda r: asked.append(r.url) if "/stream?" in r.url else None)
        page.goto(path)
        return page


def live(page: Page) -> None:
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")


def loss(page: Page) -> Any:
    return page.locator('[data-s="eval_loss"]')


def test_one_stream_serves_all_tabs_and_outlives_each(
    window: Window, site: Site, runs: tuple[str, str]
) -> None:
    first, second = runs
    tabs = Tabs(window, f"/runs/{first}/")
    (leader,) = tabs.pages
    live(leader)
    follower = tabs.open(f"/runs/{second}/")
    listing = tabs.open("/")
    for page in tabs.pages:
        live(page)
    assert not tabs.asked[follower]
    assert not tabs.asked[listing]
    newest = tabs.asked[leader][-1]
    assert all(f"topic={topic}" in newest for topic in (first, second, "list"))

    # Each has its own, through the one stream; and nothing of the other's.
    site.publish(first, run={"eval_loss": 1.111})
    site.publish(second, run={"eval_loss": 2.222})
    expect(loss(leader)).to_have_text("1.111")
    expect(loss(follower)).to_have_text("2.222")
    for run, text in ((first, "1.111"), (second, "2.222")):
        row = listing.locator(f'[data-run="{run}"]')
        site.publish(run, run={"id": run, "eval_loss": float(text), "state": "running"})
        expect(row.locator('[data-f="eval_loss"]')).to_have_text(text)

    # The leader goes: another takes over, where everybody was.
    leader.close()
    site.publish(second, run={"eval_loss": 3.333})
    expect(loss(follower)).to_have_text("3.333")
    live(follower)
    live(listing)
    site.publish(second, run={"eval_loss": 4.444})
    expect(loss(follower)).to_have_text("4.444")
    assert bool(tabs.asked[follower]) != bool(tabs.asked[listing]), "one of them leads"


def test_a_tab_that_hears_nothing_takes_the_lead(
    window: Window, site: Site, runs: tuple[str, str]
) -> None:
    """As when the browser has frozen the leader: its lock is held, and nothing comes of it."""
    first, second = runs
    tabs = Tabs(window, f"/runs/{first}/")
    (leader,) = tabs.pages
    live(leader)
    follower = tabs.context.new_page()
    asked: list[str] = []
    follower.on("request", lambda r: asked.append(r.url) if "/stream?" in r.url else None)
    follower.clock.install()
    follower.goto(f"/runs/{second}/")
    live(follower)
    assert not asked
    follower.clock.fast_forward(120_000)
    follower.clock.resume()
    with follower.expect_request(lambda r: "/stream?" in r.url):
        pass
    site.publish(second, run={"eval_loss": 5.555})
    expect(loss(follower)).to_have_text("5.555")
    live(leader)
    site.publish(first, run={"eval_loss": 6.666})
    expect(loss(leader)).to_have_text("6.666")


def test_without_locks_each_tab_has_its_own_stream(
    window: Window, site: Site, runs: tuple[str, str]
) -> None:
    """As over plain HTTP from another machine."""
    page = window.open("/planner")
    page.context.add_init_script("Object.defineProperty(navigator, 'locks', { value: undefined })")
    tabs = [page, page.context.new_page()]
    for tab, run in zip(tabs, runs, strict=True):
        tab.goto(f"/runs/{run}/")
        live(tab)
        assert tab.evaluate("navigator.locks") is None
    for tab, run in zip(tabs, runs, strict=True):
        site.publish(run, run={"eval_loss": 1.234})
        expect(loss(tab)).to_have_text("1.234")


def test_a_resync_by_name_loads_that_page_again(
    window: Window, site: Site, runs: tuple[str, str]
) -> None:
    first, second = runs
    tabs = Tabs(window, f"/runs/{first}/")
    other = tabs.open(f"/runs/{second}/")
    for page in tabs.pages:
        live(page)
    loads: list[str] = []
    for page in tabs.pages:
        page.on("request", lambda r: loads.append(r.url) if "snapshot" in r.url else None)
    site.python(
        f"from runs.models import Run; Run.objects.filter(pk='{second}').update(eval_loss=0.25);"
        f"from runs import live_stream as live; assert live.resync('{second}')"
    )
    expect(loss(other)).to_have_text("0.250")
    assert all(second in url for url in loads)
