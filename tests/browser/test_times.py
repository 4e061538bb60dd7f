"""Times: relative or in the zone of the browser, with date and zone on hover and focus."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import BLANK, Site, Window, eventually
from tests.browser.test_chart_values import WRITTEN

pytestmark = pytest.mark.browser

ABSOLUTE = re.compile(
    r"^[A-Z][a-z]{2} \d{1,2}, \d{4}, \d\d:\d\d:\d\d (UTC|GMT\S*)(: link to this line)?$"
)
FOUR_DAYS = """
from datetime import timedelta
from runs.metrics.blocks import Points
from runs.metrics.downsampling import add_points
run = seed.run(seed.user("olga", "operator"), name="Days", committed=3, age_s=10 * 86400)
begun = run.first_step_at.timestamp()
steps = list(range(200, 4000))
add_points(run, run.replicas.get(number=0), {"loss": Points.of(
    step=steps, round=[4] * len(steps), tokens=steps,
    wall_s=[begun + s * 90 for s in steps], value=[2.0] * len(steps))}, key="step")
run.last_seen_at = run.first_step_at + timedelta(days=4)
run.save()
print(run.pk)
"""


def titles(page: Page) -> list[str]:
    title = "all => all.map((time) => time.closest('[title]')?.title ?? '')"
    found: list[str] = page.locator("time:visible").evaluate_all(title)
    return found


def dates(drawn: list[str]) -> set[str]:
    """The dates without a time among the drawn texts."""
    return {text for text in drawn if re.match(r"^[A-Z][a-z]{2} \d{1,2}$", text)}


def check_times(page: Page) -> None:
    eventually(page, lambda: titles(page), lambda all_: all(map(ABSOLUTE.match, all_)))
    assert "Invalid Date" not in page.content()
    # Times have no other form than those of the component, except for browsers without scripts.
    drawn = re.sub(r"<noscript>.*?</noscript>", "", page.content(), flags=re.DOTALL)
    assert "UTC</" not in drawn


def test_every_time_has_an_absolute_time_with_a_zone(window: Window, site: Site) -> None:
    run = site.seed("name='Times', committed=8")
    page = window.open(f"/runs/{run}/")
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    check_times(page)
    for tab in ("Rounds", "Checkpoints", "Settings", "Activity"):
        page.locator(".tabs").get_by_role("link", name=tab).click()
        expect(page.locator(f'[data-panel="{tab.lower()}"]')).to_be_visible()
        check_times(page)
    page.goto(f"/runs/{run}/?tab=rounds&round=6")
    expect(page.locator("[data-round-detail] time").first).to_be_visible()
    check_times(page)


def test_a_time_shows_its_title_on_focus(window: Window, site: Site) -> None:
    run = site.seed("name='Focus', committed=8")
    page = window.open(f"/runs/{run}/?tab=settings")
    time = page.locator("time[data-clock]:visible")
    expect(time).to_have_text(re.compile(r"^(\w{3} \d+, \d\d:\d\d|\d\d:\d\d:\d\d)$"))
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_hidden()
    page.keyboard.press("Tab")  # focus by the keyboard
    time.focus()
    expect(tip).to_have_text(ABSOLUTE)
    window.shoot(page, "time-tooltip", full=False)
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_an_unknown_time_is_a_dash(window: Window) -> None:
    page = window.open("/")
    hidden = page.locator("[data-banner=silent] time")
    expect(hidden).to_have_text("–")
    expect(hidden).not_to_have_attribute("title", re.compile(""))


def test_axes_of_several_days_have_dates(window: Window, site: Site) -> None:
    run = site.python(FOUR_DAYS)
    page = window.open(BLANK)
    page.add_init_script(WRITTEN)
    page.goto(f"/runs/{run}/?x=wall")
    expect(page.locator('[data-plot="loss"] [data-id="r0"] output')).to_have_text("2.000")
    drawn = eventually(page, lambda: page.evaluate("written"), lambda texts: len(dates(texts)) >= 3)
    assert any(re.match(r"^time \((UTC|GMT\S*)\)$", text) for text in drawn), drawn
    page.goto(f"/runs/{run}/?tab=timeline")
    expect(page.locator("[data-timeline] [data-badge]")).to_contain_text("bars")
    eventually(page, lambda: page.evaluate("written"), lambda texts: len(dates(texts)) >= 3)
    page.locator("[data-timeline] canvas").first.hover(position={"x": 300, "y": 30})
    expect(page.locator("[data-timeline] [data-announce]")).to_have_text(
        re.compile(r"at [A-Z][a-z]{2} \d{1,2}, \d\d:\d\d:\d\d")
    )
