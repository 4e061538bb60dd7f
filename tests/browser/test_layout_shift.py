"""Nothing moves while a page loads: the server renders frames and figures in their final size.

A page that a click opens is read at once, so a shift after its first frame is a wrong click. Shifts
before the text has its final font are not counted: on a busy machine the font can be late.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import BLANK, Site, Window, eventually
from tests.matrix import matrix

pytestmark = [pytest.mark.browser, pytest.mark.weight(5)]

WIDTHS = (390, 1440)

MOVED = """
window.moved = [];
let changed = 0; // when text got its final font, which has another width
document.addEventListener("DOMContentLoaded", async () => {
    await document.fonts.load("14px Inter");
    requestAnimationFrame(() => requestAnimationFrame(() => (changed = performance.now())));
});
new PerformanceObserver((list) => {
    for (const { value, startTime, sources } of list.getEntries())
        for (const { node, previousRect, currentRect } of sources)
            moved.push({
                isLater: () => startTime > changed,
                value: value / sources.length,
                text:
                    `${(node?.closest ? node : node?.parentElement)?.className}: ${value}, ` +
                    `${JSON.stringify(previousRect)} -> ${JSON.stringify(currentRect)}`,
            });
}).observe({ type: "layout-shift", buffered: true });
"""


@matrix(("replicas", "width"), [(4, 1440), (40, 1440), (4, 390)], fast=1)
def test_nothing_moves_while_the_page_loads(
    window: Window, site: Site, replicas: int, width: int
) -> None:
    run = site.seed(f"name='Calm', replicas={replicas}, committed=6")
    page = window.open(BLANK, width=width)
    page.add_init_script(MOVED)
    page.goto(f"/runs/{run}/")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    expect(page.locator("[data-rail-replicas] a[title]")).to_have_count(replicas)
    expect(page.locator('[data-heatmap="small"] .heat-announce')).to_contain_text("6 of")
    expect(page.locator('[data-plot="loss"] [data-chart]')).not_to_have_attribute(
        "data-empty", "Loading"
    )
    # The elapsed time and the indicator of the connection are as wide as their texts.
    moved = page.evaluate("moved.filter((one) => one.isLater())")
    assert sum(one["value"] for one in moved) < 0.001, [one["text"] for one in moved]


def moved(page: Page, path: str, *loaded: str) -> list[str]:
    """List what moves while ``path`` is loaded, at each width, until it shows ``loaded``."""
    result = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(path)
        for selector in loaded:
            expect(page.locator(selector).first).to_be_visible()
        frames = "new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(shown)))"
        page.evaluate(frames)
        entries = page.evaluate("moved.filter((one) => one.isLater())")
        if sum(one["value"] for one in entries) >= 0.0005:
            result += [f"{width}: {one['text']}" for one in entries]
    return result


LIVE = ".conn[data-state=live]"
TABS = {
    "rounds": "[data-rounds-table] tbody tr",
    "timeline": "[data-timeline] [data-badge]:not(:empty)",
    "replicas": '[data-replicas="long"] tbody tr',
    "logs": "[data-lines] > *",
    "system": '[data-plot="gpu"] .legend button',
    "checkpoints": LIVE,
    "evaluations": LIVE,
    "settings": LIVE,
    "activity": LIVE,
}
"""Selector of an element that each tab shows once it is loaded."""


@pytest.mark.slow
def test_nothing_moves_in_a_tab_that_the_address_opens(window: Window, site: Site) -> None:
    # A run without data for three minutes has a banner, and on a busy machine they pass here.
    run = site.python(
        "from datetime import timedelta\nfrom tests.browser import seed_usage\n"
        "run = seed.run(seed.user('olga', 'operator'), name='Tabs', replicas=6, committed=9)\n"
        "run.last_seen_at += timedelta(hours=1)\nrun.save()\nprint(seed_usage.used(run).pk)"
    ).strip()
    page = window.open(BLANK)
    page.add_init_script(MOVED)
    for tab, loaded in TABS.items():
        assert moved(page, f"/runs/{run}/?tab={tab}", LIVE, loaded) == [], tab


def test_nothing_moves_when_the_monospaced_font_is_late(window: Window, site: Site) -> None:
    run = site.seed("name='Late font', replicas=6, committed=9")
    page = window.open(BLANK, width=390)
    held: list[Route] = []
    page.route("**/geist-mono.woff2", lambda route: held.append(route))
    page.goto(f"/runs/{run}/?tab=settings", wait_until="commit")
    expect(page.locator(LIVE)).to_be_visible()
    eventually(page, lambda: len(held), bool)

    def tops() -> list[float]:
        page.evaluate("document.fonts.load('14px Inter')")
        rows = "[...document.querySelectorAll('main :is(section, dl, dd, tr, td)')]"
        found: list[float] = page.evaluate(f"{rows}.map((one) => one.getBoundingClientRect().top)")
        return found

    before = tops()
    assert len(before) > 20
    for route in held:
        route.continue_()
    page.evaluate("document.fonts.load(\"14px 'Geist Mono'\")")
    assert tops() == before


@pytest.mark.slow
def test_nothing_moves_at_the_start_and_the_end_of_a_run(window: Window, site: Site) -> None:
    begun = site.seed("name='Begun', state='provisioning', committed=0")
    done = site.seed("name='Ended', state='succeeded', committed=6, age_s=9000")
    page = window.open(BLANK)
    page.add_init_script(MOVED)
    steps = "[data-checklist-items] [data-step=busy]"
    assert moved(page, f"/runs/{begun}/", LIVE, steps) == []
    assert moved(page, f"/runs/{done}/", "[data-result-note]:not(:empty)") == []


@pytest.mark.slow
def test_nothing_moves_on_other_pages(window: Window, site: Site) -> None:
    ids = [site.seed(f"name='Page {n}', committed=4") for n in range(2)]
    board = site.python(
        "from runs.actions import boards\n"
        f"print(boards.save(seed.user('admin', 'admin'), name='Two', runs={ids}).pk)"
    ).strip()
    compared = "[data-compare] .legend button"
    pages = {
        "/": (LIVE, ".totals:not([data-empty])"),
        f"/?sel={ids[0]}": (LIVE, "[data-bulk]"),
        "/runs/new": ("[data-search]",),
        "/planner": ("[data-legend] > *",),
        "/sweeps": ("h1",),
        "/fleet": (LIVE,),
        "/spend": ("h1",),
        f"/compare?ids={','.join(ids)}": (compared,),
        f"/boards/{board}": (".legend button",),
        "/settings/backends": ("h1",),
        "/alerts": ("h1",),
    }
    page = window.open(BLANK, user="admin")
    page.add_init_script(MOVED)
    for path, loaded in pages.items():
        assert moved(page, path, *loaded) == [], path
