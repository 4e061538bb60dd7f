"""Spending: periods in the address, a chart with its table, links from rows."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Site, Window

pytestmark = pytest.mark.browser


CHEAPER = """
from django.db.models import F
from runs.models import ReplicaAttempt
of_sofia = ReplicaAttempt.objects.filter(replica__run__owner__username="sofia")
of_sofia.update(price_usd_h=F("price_usd_h") / 2, cost_usd=F("cost_usd") / 2)
print(of_sofia.first().replica.run_id)
"""


@pytest.fixture(scope="module")
def filled(site: Site) -> None:
    site.python(
        "from tests.browser import seed_spend\n"
        "seed_spend.fleet(seed.user('sofia', 'operator'), seed.user('sven', 'operator'))"
    )


def test_the_bar_of_a_day_is_as_high_as_its_sum_and_follows_costs(
    window: Window, site: Site, filled: None
) -> None:
    page = window.open("/spend", user="vera")
    table = page.locator("summary", has_text="Table")
    table.click()
    rows = page.get_by_role("table", name="Spending by day and backend").locator("tbody tr")
    expect(rows).to_have_count(7)
    sums = []
    for row in reversed(rows.all()):
        found = re.match(r"\$([\d,.]+)", row.locator("td").first.inner_text())
        sums.append(float(found[1].replace(",", "")) if found else 0.0)
    heights = page.locator(".bars rect").evaluate_all(
        "(bars) => bars.reduce((sums, bar) => {"
        "  sums[bar.x.baseVal.value] = (sums[bar.x.baseVal.value] ?? 0) + bar.height.baseVal.value;"
        "  return sums; }, {})"
    )
    highest = max(heights.values()) / max(sums)
    for place, dollars in enumerate(sums):
        height = next((h for x, h in heights.items() if float(x) // 10 == place), 0.0)
        assert height == pytest.approx(dollars * highest, abs=0.5)
    # The page follows the costs of runs. The table stays open and keeps the focus.
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    spent = page.locator(".sums dd").first
    before = spent.inner_text()
    run = site.python(CHEAPER)
    site.publish(run, run={"id": run})
    expect(spent).not_to_have_text(before)
    expect(rows.first).to_be_visible()
    expect(table).to_be_focused()


def test_period_filter_and_links(window: Window, filled: None) -> None:
    page = window.open("/spend", user="vera")
    page.get_by_role("link", name="30 days").click()
    page.wait_for_url("**/spend?days=30")
    expect(page.get_by_role("link", name="30 days")).to_have_attribute("aria-current", "true")
    page.get_by_role("link", name="sven", exact=True).click()
    page.wait_for_url("**/spend?owner=sven&from=*")
    expect(page.get_by_role("table", name="Spending by owner").locator("tbody tr")).to_have_count(1)
    expect(page.locator(".banner", has_text="without a price")).to_be_visible()
    page.get_by_role("link", name="On our cluster").first.click()
    page.wait_for_url(re.compile(r"/runs/[0-9a-f-]+/$"))


def test_back_shows_the_period_of_the_address(window: Window, filled: None) -> None:
    page = window.open("/spend", user="vera")
    first = page.get_by_label("From")
    expect(first).not_to_have_value("")
    shown = first.input_value()
    first.fill("2026-01-31")
    page.get_by_label("To").fill("2026-01-31")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/spend?from=2026-01-31*")
    page.go_back()
    page.wait_for_url("**/spend")
    expect(first).to_have_value(shown)
