"""Pools and replicas of a run: their tables, live updates, and the actions of operators."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Site, Window, eventually, expect_address
from tests.matrix import matrix

pytestmark = pytest.mark.browser


@pytest.fixture
def run(site: Site) -> str:
    return site.python(
        "from tests.browser import seed_fleet\n"
        "print(seed_fleet.mixed(seed.user('olga', 'operator'), state='running').pk)"
    )


def fleet(window: Window, run: str, query: str = "", **options: Any) -> Page:
    page = window.open(f"/runs/{run}/?tab=replicas{query}", **options)
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    return page


def test_pools_show_region_price_and_last_error_and_are_scaled(window: Window, run: str) -> None:
    page = fleet(window, run)
    modal = page.locator("table.pools tbody tr", has_text="Modal H100").first
    for text in ("us-east", "3 of 3", "$3.95/h", "Action required"):
        expect(modal).to_contain_text(text)
    expect(page.locator("table.pools")).to_contain_text("exceeded your current quota of 2 GPUs")
    expect(page.locator("table.pools")).to_contain_text("Nothing is launched in this pool")
    paused = page.locator("table.pools tbody tr", has_text="Kubernetes gpu").first
    expect(paused).to_contain_text("Paused after failures")
    expect(page.locator("table.pools")).to_contain_text("unknown")
    expect(page.locator('[data-s="cost"]')).to_have_text("$12.35 +")
    expect(page.locator('[data-s="budget"]')).to_have_text("of $15.00 budget")
    row = page.locator("table.pools tbody tr", has_text="Hugging Face Jobs").first
    row.get_by_role("button", name="Scale").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="One more").click()
    expect(dialog.get_by_label("Replicas wanted")).to_have_value("3")
    expect(dialog).to_contain_text("+$1.50 an hour")
    dialog.get_by_role("button", name="Scale", exact=True).click()
    expect(page.get_by_role("status").filter(has_text="3 wanted, 1 more")).to_be_visible()
    expect(row).to_contain_text("of 3")


def test_replicas_are_grouped_and_filtered_by_pool(window: Window, run: str) -> None:
    page = fleet(window, run)
    table = page.locator('[data-replicas="long"] table')
    expect(table.locator("tr.group")).to_have_count(5)
    expect(table.locator("tbody tr:not(.group)")).to_have_count(10)
    page.get_by_role("button", name="Modal H100").click()
    expect(table.locator("tbody tr")).to_have_count(3)
    expect_address(page, "pool=")
    again = window.open(page.url.removeprefix(window.url))
    expect(again.locator('[data-replicas="long"] tbody tr')).to_have_count(3)
    expect(again.locator("[data-pool-filter]")).not_to_have_value("")
    again.locator("[data-pool-filter]").select_option("")
    expect(again.locator('[data-replicas="long"] tbody tr')).to_have_count(15)
    expect(again).not_to_have_url(re.compile("pool="))


def test_deltas_update_costs_and_deadlines(window: Window, run: str, site: Site) -> None:
    """The banner of a blocked pool is on every tab, until the pool is healthy again."""
    page = window.open(f"/runs/{run}/")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    banner = page.locator("[data-trouble] .banner").first
    expect(banner).to_contain_text("Modal H100 is blocked")
    accounts = banner.get_by_role("link", name="Backends")
    expect(accounts).to_have_attribute("href", "/settings/backends")
    expect(accounts).to_be_visible()
    banner.get_by_role("link", name="Details").click()
    expect(page.locator("table.pools")).to_be_visible()
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    rows = site.python(
        "import json\nfrom runs.queries import fleet\nfrom runs.models import Run\n"
        f"run = Run.objects.get(pk='{run}')\n"
        "print(json.dumps([fleet.pool_rows(run), fleet.replica_rows(run)]))"
    )
    pools, replicas = json.loads(rows)
    modal = next(p for p in pools if p["backend"] == "modal")
    modal |= {"wanted": 8, "cost_usd": 99.5}
    modal["breaker"] = {
        "state": "healthy",
        "failures": 0,
        "open_until": None,
        "last_error": "",
        "advice": "",
    }
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=5, seconds=59)
    replicas[3] |= {
        "attempt": 77,
        "backend_state": "Scheduling",
        "deadline_at": later.isoformat(),
        "cost_usd": 41.25,
    }
    header = {"cost_usd": 14.99, "cost_known": True}
    site.publish(run, run=header, pools=pools, replicas=replicas)
    tr = page.locator("table.pools tbody tr", has_text="Modal H100").first
    expect(tr).to_contain_text("3 of 8")
    expect(tr).to_contain_text("$99.50")
    expect(page.locator("table.pools")).not_to_contain_text("exceeded your current quota")
    expect(page.locator("[data-trouble] .banner")).to_have_count(1)
    replica = page.locator('[data-replicas="long"] tr[data-key="3"]')
    expect(replica).to_contain_text("Scheduling")
    expect(replica).to_contain_text("77")
    expect(replica).to_contain_text("5h 00m left")
    expect(replica).to_contain_text("$41.25")
    expect(page.locator('[data-s="cost"]')).to_have_text("$14.99")


def test_stop_dialog_shows_the_consequences_and_stops(window: Window, run: str, site: Site) -> None:
    page = fleet(window, run)
    page.get_by_role("button", name="Stop replica 3").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("8 replicas remain, with a quorum of 1")
    expect(dialog.get_by_role("radio", name="Drain")).to_be_checked()
    window.shoot(page, "stop-replica", full=False)
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    site.publish(run, run={"live": 4, "quorum": 4})
    expect(page.locator('[data-s="live"]')).to_have_text("4")
    page.get_by_role("button", name="Stop replica 3").click()
    expect(dialog).to_contain_text("Live 3 < quorum 4: the run will stall")
    dialog.get_by_role("radio", name="Cancel its job now").check()
    dialog.get_by_role("button", name="Stop replica 3").click()
    expect(page.get_by_role("status").filter(has_text="Replica 3: stopping")).to_be_visible()
    state = (
        "from runs.models import Replica\n"
        f"r = Replica.objects.get(run='{run}', number=3); print(r.state, bool(r.cancel_at))"
    )
    assert site.python(state) == "draining True"


def test_pool_is_added(window: Window, run: str) -> None:
    page = fleet(window, run)
    page.get_by_role("link", name="Add a pool").click()
    page.get_by_label("Replicas").fill("2")
    page.get_by_role("button", name="Add and launch").dblclick()
    expect(page.get_by_role("status").filter(has_text="CPU of this machine added")).to_be_visible()
    expect(page.locator("table.pools tbody tr", has_text="CPU of this machine")).to_have_count(2)


@matrix("user", ["vera", "oscar"], fast=("oscar",))
def test_users_without_permission_see_no_buttons(window: Window, run: str, user: str) -> None:
    page = fleet(window, run, user=user)
    expect(page.locator("table.pools")).to_contain_text("Modal H100")
    for name in ("Scale", "Stop", "Restart replica 3"):  # of the run, and of its replicas
        expect(page.get_by_role("button", name=name)).to_have_count(0)
    expect(page.get_by_role("link", name="Add a pool")).to_have_count(0)


def test_replica_page_shows_attempts_and_live_state_and_restarts(
    window: Window, run: str, site: Site
) -> None:
    page = fleet(window, run)
    page.get_by_role("link", name="Replica 3").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Replica 3")
    table = page.locator('[aria-labelledby="h-attempts"] table')
    expect(table.locator("tbody tr")).to_have_count(4)
    expect(table).to_contain_text("OOMKilled: the container used more than its 24Gi")
    expect(page.locator("[data-log-state]")).to_have_text("unknown")  # no backend answers
    # A page that is shown again while a request is under way has each line once.
    log = {"lines": ["first line"], "position": "1", "ended": True}
    rest = {"lines": [], "position": "1", "ended": True}
    held: list[Route] = []

    def answer(route: Route) -> None:
        if "after=1" in route.request.url:
            route.fulfill(json=rest)
        elif released:
            route.fulfill(json=log)
        else:
            held.append(route)

    released = False
    page.route(re.compile("attempt=.*after="), answer)
    for _ in range(2):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    eventually(page, lambda: len(held), lambda number: number >= 2)
    released = True  # the page can have sent its own request as well
    for route in held:
        route.fulfill(json=log)
    page.evaluate("() => fetch(location.href).then(() => null)")  # both were handled
    expect(page.locator("[data-log-lines] p", has_text="first line")).to_have_count(1)
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    site.python(
        "from runs.models import Replica\n"
        f"Replica.objects.filter(run='{run}', number=3).update(state='uploading')"
    )
    site.publish(run, replicas=[{"number": 3, "state": "uploading"}])
    expect(page.locator(".run-title .state")).to_have_text("uploading")
    table.get_by_role("link", name="2").click()
    expect(page.locator("[data-shown]")).to_have_text("2")
    # Another page: before its script runs, the button sends the form without a dialog.
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    page.get_by_role("button", name="Restart").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("launched again as a new attempt")
    dialog.get_by_role("button", name="Restart replica 3").click()
    expect(page.get_by_role("status").filter(has_text="restarting")).to_be_visible()
    expect(page.locator(".run-title .state")).to_have_text("restarting")
