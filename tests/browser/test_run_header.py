"""The header and the figures of the run page: one line in sight, and nothing stale as current."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Site, Window, eventually, overflow

pytestmark = pytest.mark.browser


def box(page: Page, selector: str) -> dict[str, float]:
    found = page.locator(selector).first.bounding_box()
    assert found is not None
    return dict(found)


def test_first_chart_is_near_the_top(window: Window, site: Site) -> None:
    run = site.seed("name='Local demo', reason='all 4 replicas live'")
    page = window.open(f"/runs/{run}/")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    assert box(page, "section.plot")["y"] <= 150
    head = box(page, ".run-bar")
    assert head["height"] == 44
    page.mouse.wheel(0, 900)
    expect(page.locator(".board-bar").first).to_be_in_viewport()
    eventually(page, lambda: page.evaluate("scrollY"), lambda pixels: pixels > 0)
    below = box(page, ".topbar")["height"]
    eventually(page, lambda: box(page, ".run-bar")["y"], lambda top: top == below)
    expect(page.locator(".run-bar").get_by_role("link", name="Runs")).to_have_count(1)


def covers_nothing(page: Page, parts: str) -> bool:
    """Whether the parts of a page, from top to bottom, end before the next row of them begins."""
    boxes = [part.bounding_box() for part in page.locator(parts).filter(visible=True).all()]
    rows = sorted((b["y"], b["y"] + b["height"]) for b in boxes if b is not None)
    return all(b <= c or a == c for (a, b), (c, _) in itertools.pairwise(rows))


def test_header_of_a_long_name_is_one_line(window: Window, site: Site) -> None:
    long = "'" + "A run with a very long name " * 3 + "', state='degraded'"
    run = site.seed(f"name={long}, reason='live 3 < target 4: ' + 'replica 3 is lost, ' * 9")
    page = window.open(f"/runs/{run}/", width=360)
    for width in (360, 1440, 1100):
        page.set_viewport_size({"width": width, "height": 900})
        if width == 1440:  # the scripts of a wide page measure at its start
            page.reload()
        expect(page.locator(".conn")).to_have_attribute("data-state", "live")
        assert overflow(page) <= 0
        assert covers_nothing(page, ".panels > *"), width
        if width > 1023:
            eventually(page, lambda: box(page, ".run-bar")["height"], lambda pixels: pixels == 44)
        window.shoot(page, f"run-header-{width}", full=False)


def test_silent_run_shows_no_pace(window: Window, site: Site) -> None:
    run = site.seed("name='Silent', committed=6")
    page = window.open(f"/runs/{run}/")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    shown = {name: page.locator(f'[data-s="{name}"]') for name in ("eta", "speed", "as_of")}
    expect(shown["eta"]).to_have_text(re.compile("left$"))
    expect(shown["speed"]).to_have_text("22.4k tokens/s")
    expect(shown["as_of"]).to_be_hidden()
    then = datetime.now(UTC) - timedelta(minutes=38)
    site.publish(run, run={"last_seen_at": then.isoformat()})
    expect(shown["eta"]).to_have_text("")
    expect(shown["speed"]).to_have_text("")
    expect(shown["as_of"]).to_have_text("As of 38 min ago")
    expect(page.locator("[data-banner=stale]")).to_contain_text("No data for 38 min.")
    window.shoot(page, "run-silent", full=False)
    site.publish(run, run={"last_seen_at": datetime.now(UTC).isoformat()})
    expect(shown["speed"]).to_have_text("22.4k tokens/s")
    expect(shown["as_of"]).to_be_hidden()


def test_elapsed_does_not_jump_back_at_the_first_step(window: Window, site: Site) -> None:
    run = site.seed("name='Starting', state='provisioning', committed=0")
    page = window.open(f"/runs/{run}/", alone=True)
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    now = datetime.now(UTC)
    page.clock.set_fixed_time(now)
    created = (now - timedelta(seconds=90)).isoformat()
    elapsed = page.locator('[data-s="elapsed"]')
    site.publish(run, run={"created_at": created, "started_at": None})
    expect(elapsed).to_have_text("1m 30s")
    started = {"started_at": (now - timedelta(seconds=5)).isoformat(), "committed_rounds": 1}
    site.publish(run, run=started)
    expect(page.locator('[data-s="rounds"]')).to_have_text("1")
    expect(elapsed).to_have_text("1m 30s")


TOPS = "items => items.map(item => item.getBoundingClientRect().top)"


def test_startup_checklist_is_aligned(window: Window, site: Site) -> None:
    run = site.seed("name='Wrapped', state='provisioning', committed=0, replicas=2")
    site.python(
        "from runs.models import Replica\n"
        f"replicas = Replica.objects.filter(run={run!r})\n"
        "replicas.update(state='provisioning', step=0,"
        " backend_state='pending: 0/12 nodes are available: 12 Insufficient nvidia.com/gpu')"
    )
    page = window.open(f"/runs/{run}/", width=1100)
    items = page.locator("[data-checklist-items] li")
    expect(items.nth(2)).to_contain_text("nodes are available")
    heights = items.locator("span").evaluate_all("spans => spans.map(s => s.offsetHeight)")
    assert max(heights) > min(heights), "no cell wraps"
    for part in ("b", "span"):
        assert len(set(items.locator(part).evaluate_all(TOPS))) == 1, part
    window.shoot(page, "checklist-wrapped", full=False)


def test_rate_is_that_of_the_running_jobs(window: Window, site: Site) -> None:
    """The price of a pool can change after its jobs were launched."""
    run = site.python(
        "from runs import models\n"
        "from tests.browser import seed_fleet\n"
        "run = seed_fleet.mixed(seed.user('olga', 'operator'), name='Rates')\n"
        "models.ReplicaPool.objects.filter(run=run, backend='modal').update(price_usd_h=99.0)\n"
        "print(run.pk)"
    )
    page = window.open(f"/runs/{run.strip()}/")
    rate = page.locator('[data-s="rate"]')
    expect(rate).to_have_text("$15.65/h +")
    expect(page.locator('[data-s="cost"]')).to_have_text("$12.35 +")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    site.publish(run.strip(), run={"usd_h": 3.5, "usd_h_known": True, "alerts": 3})
    expect(page.locator("[data-alert-count] [data-n]")).to_have_text("3")
    expect(rate).to_have_text("$3.50/h")
    site.publish(run.strip(), run={"usd_h": 0.0, "usd_h_known": False})
    expect(rate).to_have_text("")
