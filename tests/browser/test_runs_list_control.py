"""Control from the list: see why runs failed, read tags, marks, filters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import BLANK, QUICK_TIMERS, Site, Window, eventually, overflow

pytestmark = pytest.mark.browser

ARCHIVE_ALL = """
from runs.models import Run
from django.utils import timezone
Run.objects.update(archived_at=timezone.now())
"""
MAKE = """
import datetime
from runs.models import Run, ReplicaPool
from tests.browser.seed_prices import priced
olga = seed.user('olga', 'operator')
long = 'A run with a very long name that shows how the page wraps and truncates it'
why = 'bucket: access denied (403) for PutObject. ' + 'It needs another credential. ' * 12
runs = [
    priced(seed.run(olga, name='Hot', replicas=4, age_s=60), 4.0),
    priced(seed.run(olga, name='Hotter', replicas=8, age_s=50), 2.0),
    priced(seed.run(olga, name='Cheap', replicas=2, age_s=40), 1.0),
    seed.run(olga, name='Bad bucket', state='failed', committed=0, age_s=30, reason=why),
    seed.run(olga, name=long, age_s=20),
]
for backend in ('modal', 'kubernetes', 'a-backend-with-thirty-two-letters', 'vast', 'runpod'):
    ReplicaPool.objects.create(run=runs[4], backend=backend[:32], count=1, price_usd_h=1.0)
tags = ['sweep', 'learning-rate-schedule', 'an-exceptionally-long-tag-of-40-letters-']
silent = timezone.now() - datetime.timedelta(minutes=38)
Run.objects.filter(pk=runs[4].pk).update(tags=tags, last_seen_at=silent)
print(' '.join(str(r.pk) for r in runs))
"""


@pytest.fixture
def runs(site: Site) -> Iterator[list[str]]:
    yield site.python(ARCHIVE_ALL + MAKE).split()
    site.python(ARCHIVE_ALL)


def cut(page: Page, selector: str) -> list[str]:
    """Texts that do not fit into their element, or lie outside of an ancestor that cuts them."""
    texts: list[str] = page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].filter((element) => {
            if (!element.checkVisibility()) return false;
            if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth) return true;
            const box = element.getBoundingClientRect();
            for (let up = element.parentElement; up; up = up.parentElement) {
                const limit = up.getBoundingClientRect();
                if (getComputedStyle(up).overflowX === "visible") continue;
                if (box.right > limit.right + 1 || box.bottom > limit.bottom + 1) return true;
            }
            return false;
        }).map((element) => element.textContent)""",
        selector,
    )
    return texts


def test_tabs_and_totals(window: Window, runs: list[str]) -> None:
    page = window.open("/")
    tabs = page.get_by_role("navigation", name="Tabs of the list")
    for name, count in (("active", 4), ("mine", 5), ("failed", 1), ("all", 5)):
        expect(tabs.locator(f'[data-total="{name}"]')).to_have_text(str(count))
    total = page.get_by_label("Totals of the listed runs")
    expect(total).to_contain_text("5 runs")
    expect(total).to_contain_text("$34.00 an hour")
    expect(total.get_by_role("link", name="GPUs in use")).to_have_attribute("href", "/fleet")
    tabs.get_by_role("link", name="Failed").click()
    expect(page.locator("[data-run]")).to_have_count(1)
    expect(tabs.get_by_role("link", name="Failed")).to_have_attribute("aria-current", "page")
    expect(page.get_by_label("Find runs")).to_have_value("state:failed")
    expect(total).to_contain_text("1 run")


def test_totals_follow_live_updates(window: Window, site: Site, runs: list[str]) -> None:
    page = window.open(BLANK)
    page.add_init_script(QUICK_TIMERS)
    page.goto("/")
    expect(page.locator("[data-conn]")).to_have_text("Live")
    expect(page.locator('[data-total="failed"]')).to_have_text("1")
    expect(page.locator('[data-total="active_runs"]')).to_have_text("4")
    row = page.locator(f'[data-run="{runs[2]}"]')
    expect(row.locator(".why")).to_be_hidden()
    header = site.python(
        "import json\nfrom runs.models import Run\nfrom runs.queries import selectors\n"
        f"run = Run.objects.filter(pk='{runs[2]}')\n"
        "run.update(state='failed', state_reason='all replicas are lost')\n"
        "print(json.dumps(selectors.run_header(run.get())))"
    )
    site.publish(runs[2], run=json.loads(header))
    expect(row.locator(".why")).to_have_text("all replicas are lost")
    expect(page.locator('[data-total="failed"]')).to_have_text("2")
    expect(page.locator('[data-total="active_runs"]')).to_have_text("3")


def test_reason_is_one_line_with_all_of_it_on_hover_and_focus(
    window: Window, runs: list[str]
) -> None:
    page = window.open("/", width=390)
    row = page.locator(f'[data-run="{runs[3]}"]')
    why = row.locator(".why")
    for width in (390, 1280, 1440):
        window.fits(page, "runs-reason", width, full=False)
        page.mouse.move(0, 0)
        expect(why).not_to_have_css("white-space", "pre-wrap")
        assert (why.bounding_box() or {})["height"] <= 22, width
        assert cut(page, ".why") != [], width
        before = row.bounding_box()
        for show in (why.hover, why.focus):
            show()
            expect(why).to_have_css("white-space", "pre-wrap")
            eventually(page, lambda: cut(page, ".why"), lambda texts: texts == [])
        if width > 720:  # it covers rows and does not move them
            assert row.bounding_box() == before, width
        assert overflow(page) <= 0
        why.blur()
    why.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{runs[3]}/**")


def test_tags_and_marks_are_not_cut(window: Window, runs: list[str]) -> None:
    page = window.open("/", width=390)
    row = page.locator(f'[data-run="{runs[4]}"]')
    for width in (390, 800, 1280, 1440):
        window.fits(page, "runs-tags", width)
        expect(row.get_by_text("silent", exact=True)).to_be_visible()
        for tag in ("sweep", "learning-rate-schedule", "an-exceptionally-long-tag-of-40-letters-"):
            expect(row.get_by_text(tag, exact=True)).to_be_visible()
        assert cut(page, ".runs .tag") == [], width


def test_names_in_the_filters_are_not_cut(window: Window, runs: list[str]) -> None:
    page = window.open("/", width=390)
    page.get_by_text("Filters", exact=True).click()
    expect(page.locator(".facet", has_text="a-backend-with-thirty-two-letter")).to_be_visible()
    for width in (390, 800, 1440):
        window.fits(page, "runs-filters-long", width, full=False)
        eventually(page, lambda: cut(page, ".facet .value, .facet .cut"), lambda texts: texts == [])


def test_all_runs_that_match_are_stopped_after_a_confirmation(
    window: Window, site: Site, runs: list[str]
) -> None:
    before = site.python(
        "from runs.models import Run\n"
        "from runs.queries.listing import Order, page\n"
        "print(page(Run.objects.filter(archived_at=None), Order(), limit=3)[1])"
    ).strip()
    page = window.open(BLANK)
    totals: list[Route] = []
    page.route("**/runs/totals?*", lambda route: totals.append(route))
    page.goto(f"/?before={quote(before)}")
    bulk = page.locator("[data-bulk]")
    offer = bulk.get_by_role("checkbox", name="All 5 runs that match")
    first = page.locator("[data-pick]").first
    first.check()
    expect(bulk).to_contain_text("1 selected")
    expect(offer).to_be_hidden()
    page.get_by_label("Select all on this page").check()
    for request in eventually(page, lambda: totals, bool):
        request.continue_()  # the offer gets their number when the totals come
    offer.check()
    expect(bulk).to_contain_text("All that match selected")
    expect(bulk.get_by_role("button", name="Compare")).to_be_disabled()
    first.uncheck()
    expect(bulk).to_contain_text("1 selected")
    page.get_by_label("Select all on this page").check()
    expect(offer).not_to_be_checked()
    offer.check()
    window.shoot(page, "list-all-that-match", full=False)
    bulk.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Stop 4 runs?")
    expect(page.get_by_text("1 already ended")).to_be_visible()
    page.get_by_role("button", name="Stop 4 runs").click()
    expect(page.get_by_text("4 stopping")).to_be_visible()
