"""Tabs of one browser share one stream, in a shared worker; without one each tab has its own."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.browser.conftest import NO_SHARED_WORKER, Site, Window, eventually

pytestmark = pytest.mark.browser


@pytest.fixture
def runs(site: Site) -> tuple[str, str]:
    return site.seed("name='First', committed=3"), site.seed("name='Second', committed=3")


class Tabs:
    """Pages of one browser, and the stream requests of each."""

    def __init__(self, window: Window, path: str) -> None:
        self.requests: dict[Page, list[str]] = {}
        page = window.open("/planner")  # signs in; this page has no stream
        self.context: BrowserContext = page.context
        self.pages = [self._go(page, path)]

    def open(self, path: str) -> Page:
        self.pages.append(self._go(self.context.new_page(), path))
        return self.pages[-1]

    def _go(self, page: Page, path: str) -> Page:
        requests: list[str] = []
        self.requests[page] = requests
        page.on("request", lambda r: requests.append(r.url) if "/stream?" in r.url else None)
        page.goto(path)
        return page


def live(page: Page) -> None:
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")


def loss(page: Page) -> Any:
    return page.locator('[data-s="eval_loss"]')


def shared_workers(tabs: Tabs) -> int:
    session = tabs.context.new_cdp_session(tabs.pages[-1])
    targets = session.send("Target.getTargets")["targetInfos"]
    return sum(target["type"] == "shared_worker" for target in targets)


def test_one_stream_serves_all_tabs_and_survives_the_first(
    window: Window, site: Site, runs: tuple[str, str]
) -> None:
    first, second = runs
    tabs = Tabs(window, f"/runs/{first}/")
    (opener,) = tabs.pages
    live(opener)
    other = tabs.open(f"/runs/{second}/")
    listing = tabs.open("/")
    for page in tabs.pages:
        live(page)
    assert not any(tabs.requests.values()), "a tab has a stream of its own"
    # Those of the tests before end some time after their pages.
    eventually(listing, lambda: shared_workers(tabs), lambda number: number == 1)

    # Each tab receives its own topic only, through the one stream.
    site.publish(first, run={"eval_loss": 1.111})
    site.publish(second, run={"eval_loss": 2.222})
    expect(loss(opener)).to_have_text("1.111")
    expect(loss(other)).to_have_text("2.222")
    for run, text in ((first, "1.111"), (second, "2.222")):
        row = listing.locator(f'[data-run="{run}"]')
        site.publish(run, run={"id": run, "eval_loss": float(text), "state": "running"})
        expect(row.locator('[data-f="eval_loss"]')).to_have_text(text)

    # The tab that started the worker closes.
    opener.close()
    for text in ("3.333", "4.444"):
        site.publish(second, run={"eval_loss": float(text)})
        expect(loss(other)).to_have_text(text)
    live(other)
    live(listing)
    assert not any(tabs.requests.values())


@pytest.mark.slow
def test_without_shared_workers_each_tab_has_its_own_stream(
    window: Window, site: Site, runs: tuple[str, str]
) -> None:
    page = window.open("/planner", alone=True)
    page.context.add_init_script(NO_SHARED_WORKER)
    for run, text in zip(runs, ("1.234", "2.345"), strict=True):
        tab = page.context.new_page()
        with tab.expect_request(lambda r: "/stream?" in r.url):
            tab.goto(f"/runs/{run}/")
        live(tab)
        site.publish(run, run={"eval_loss": float(text)})
        expect(loss(tab)).to_have_text(text)


@pytest.mark.slow
def test_without_web_locks_tabs_share_a_stream(
    window: Window, site: Site, runs: tuple[str, str]
) -> None:
    """Web Locks are missing over plain HTTP from another machine."""
    page = window.open("/planner", alone=True)
    page.context.add_init_script("Object.defineProperty(navigator, 'locks', { value: undefined })")
    for run, text in zip(runs, ("1.234", "2.345"), strict=True):
        tab = page.context.new_page()
        tab.goto(f"/runs/{run}/")
        live(tab)
        assert tab.evaluate("navigator.locks") is None
        site.publish(run, run={"eval_loss": float(text)})
        expect(loss(tab)).to_have_text(text)


def test_a_silent_connection_is_replaced(window: Window, site: Site, runs: tuple[str, str]) -> None:
    """The server sends a heartbeat every 15 s."""
    page = window.open("/planner", alone=True)
    page.add_init_script(NO_SHARED_WORKER)
    page.clock.install()
    page.goto(f"/runs/{runs[0]}/")
    live(page)
    with page.expect_request(lambda r: "/stream?" in r.url):
        page.clock.fast_forward(60_000)
    page.clock.resume()
    # In the table too: the page can load the run again meanwhile.
    site.python(
        f"from runs.models import Run; Run.objects.filter(pk='{runs[0]}').update(eval_loss=5.555)"
    )
    site.publish(runs[0], run={"eval_loss": 5.555})
    expect(loss(page)).to_have_text("5.555")
    live(page)


def test_resync_of_one_run_reloads_only_its_page(
    window: Window, site: Site, runs: tuple[str, str]
) -> None:
    """A delta that comes before the answer is newer than the answer."""
    first, second = runs
    tabs = Tabs(window, f"/runs/{first}/")
    other = tabs.open(f"/runs/{second}/")
    for page in tabs.pages:
        live(page)
    loads: list[str] = []
    for page in tabs.pages:
        page.on("request", lambda r: loads.append(r.url) if "snapshot" in r.url else None)
    held: list[Route] = []
    other.route("**/snapshot.json?*", lambda route: held.append(route))
    site.python(
        "from runs.models import Run\nfrom runs import live_stream as live\n"
        f"Run.objects.filter(pk='{second}').update(eval_loss=0.25, committed_rounds=5)\n"
        f"assert live.resync('{second}')"
    )
    eventually(other, lambda: len(held), lambda number: number == 1)
    answer = held[0].fetch()
    site.publish(second, run={"eval_loss": 0.5})
    expect(loss(other)).to_have_text("0.500")
    held[0].fulfill(response=answer)
    expect(other.locator('[data-s="rounds"]')).to_have_text("5")
    expect(loss(other)).to_have_text("0.500")
    assert all(second in url for url in loads)
