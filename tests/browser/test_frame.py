"""The frame of every page: top bar, bell and Ctrl-K; the settings and the API reference."""

from __future__ import annotations

import re
from urllib.parse import quote_plus

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import BLANK, Site, Window, eventually

pytestmark = pytest.mark.browser

ALERTS = """
from django.utils import timezone
from runs.models import Alert, Run
from runs.live_stream import announce_alerts
def alert(run, kind, level, message, **columns):
    now = timezone.now()
    Alert.objects.create(run=run, kind=kind, level=level, message=message, first_at=now,
                         opened_at=now, **columns)
    announce_alerts()
"""


@pytest.fixture(scope="module")
def alerting(site: Site) -> str:
    """A run with alerts, and its id."""
    return site.python(
        ALERTS
        + """
from runs.actions.budgets import save_budget
from tests.browser import seed_fleet
owner = seed.user('bella', 'operator')
run = seed_fleet.mixed(owner)
Run.objects.filter(pk=run.pk).update(name='Night shift')
modal = run.pools.filter(backend='modal')
modal.update(requires_intervention=True, last_error='quota exceeded: 2 x H100')
alert(run, 'stalled', 'error', 'no round was committed for 9 min')
third = run.replicas.get(number=3)
alert(run, 'replica_lost', 'warning', 'replica 3: its job was lost', replica=third)
alert(run, 'spike', 'warning', 'loss 4.1 in round 7', closed_at=timezone.now())
admin = seed.user('ada', 'admin')
save_budget(scope='owner', name='bella', period='week', amount_usd=500.0, actor=admin)
save_budget(scope='tag', name='paper', period='month', amount_usd=0.0, actor=admin)
print(run.pk)
"""
    ).strip()


def open_bell(page: Page) -> None:
    page.locator("[data-bell]").click()
    expect(page.get_by_role("dialog", name="Alerts")).to_be_visible()
    expect(page.locator(".bell-body")).to_be_focused()  # the alerts are loaded


def test_the_bell_and_the_list_of_alerts_follow_them_without_a_reload(
    window: Window, site: Site, alerting: str
) -> None:
    page = window.open("/alerts", user="vera")
    number = page.locator("[data-bell] [data-n]")
    page.evaluate("window.kept = true")
    expect(page.locator("[data-bell]")).to_have_attribute("role", "button")  # the script runs
    before = int(number.inner_text() or "0")
    page.locator("[data-alerts] .alert-title").first.focus()
    site.python(
        ALERTS
        + f"alert(Run.objects.get(pk='{alerting}'), 'nan', 'error', 'replica 1 reported NaN')"
    )
    expect(number).to_have_text(str(before + 1))
    expect(page.locator("[data-alerts]")).to_contain_text("replica 1 reported NaN")
    expect(page.locator("[data-alerts] .alert-title:focus")).to_have_count(1)
    held: list[Route] = []
    page.route("**/alerts/summary.json", lambda route: held.append(route))
    site.python(ALERTS + "announce_alerts()")
    eventually(page, lambda: len(held), lambda requests: requests == 1)
    unread = held[0].fetch()
    open_bell(page)
    panel = page.get_by_role("dialog", name="Alerts")
    expect(panel).to_contain_text("replica 1 reported NaN")
    window.shoot(page, "bell", full=False)
    expect(number).to_be_hidden()
    with page.expect_response(re.compile("part=panel")):
        held[0].fulfill(response=unread)  # it was counted before the alerts were marked as read
    expect(number).to_be_hidden()
    expect(panel.get_by_role("button", name="Acknowledge")).to_have_count(0)  # a viewer
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    assert page.evaluate("window.kept")
    open_bell(page)
    panel.get_by_role("link", name="Loss is NaN").click()
    expect(page).to_have_url(f"{site.url}/runs/{alerting}/")


def test_the_bell_acknowledges_an_alert_and_leaves_the_page(window: Window, alerting: str) -> None:
    page = window.open(BLANK, user="bella")
    with page.expect_response("**/alerts/summary.json"):  # it loads an open panel again
        page.goto("/planner")
    open_bell(page)
    panel = page.get_by_role("dialog", name="Alerts")
    button = panel.get_by_role("button", name="Acknowledge Stalled")
    expect(button).to_be_visible()
    window.shoot(page, "bell-acknowledge", full=False)
    page.route("**/acknowledge", lambda route: route.abort())
    button.click()
    expect(panel).to_contain_text("The alerts can't be loaded now.")
    page.unroute("**/acknowledge")
    window.errors[:] = [error for error in window.errors if "ERR_FAILED" not in error]
    page.keyboard.press("Escape")
    open_bell(page)
    button.click()
    row = panel.get_by_role("listitem").filter(has_text="no round was committed for 9 min")
    expect(row).to_contain_text("acknowledged by bella")
    expect(button).to_have_count(0)
    expect(page).to_have_url(re.compile("/planner$"))


def search(page: Page, text: str) -> list[str]:
    """Enter ``text`` and return the addresses of the results, in their order on the page."""
    query = re.escape(f"?q={quote_plus(text)}&")
    with page.expect_response(re.compile(query)) as found:
        page.get_by_role("combobox", name="Run, replica, page or action").fill(text)
    expected = sorted(row["url"] for row in found.value.json()["found"])

    def shown() -> list[str]:
        options = page.locator("[role=option]")
        urls: list[str] = options.evaluate_all("all => all.map((option) => option.dataset.url)")
        return urls

    result: list[str] = eventually(page, shown, lambda urls: sorted(urls) == expected)
    return result


def test_ctrl_k_goes_to_a_run_a_replica_a_page_and_an_action(
    window: Window, site: Site, alerting: str
) -> None:
    page = window.open("/planner", user="bella")
    for text, url in (
        ("night", f"/runs/{alerting}/"),
        ("night 3", f"/runs/{alerting}/replicas/3/"),
        ("budgets", "/settings/budgets"),
        ("stop night", f"/runs/{alerting}/do/stop"),
    ):
        page.keyboard.press("Control+k")
        box = page.get_by_role("combobox", name="Run, replica, page or action")
        expect(box).to_be_focused()
        urls = search(page, text)
        for _ in range(urls.index(url)):
            page.keyboard.press("ArrowDown")
        expect(page.locator("[aria-selected=true]")).to_have_attribute("data-url", url)
        window.shoot(page, "palette", full=False)
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{site.url}{url}")
        page.wait_for_load_state()  # the next key press needs the scripts of the page
    expect(page.get_by_role("button", name="Stop")).to_be_focused()


def test_a_phone_has_a_menu_of_pages_and_a_dark_theme(window: Window, alerting: str) -> None:
    page = window.open("/alerts", user="vera", width=390)
    text = page.locator(".alert-row .alert-text").first
    eventually(page, lambda: text.evaluate("(part) => part.clientWidth"), lambda wide: wide > 280)
    expect(page.locator(".topnav")).to_be_hidden()
    body = page.locator("body")
    light = body.evaluate("element => getComputedStyle(element).backgroundColor")
    page.locator(".topbar .menu:not(.topmenu) > summary").click()
    page.get_by_role("button", name="Dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(body).not_to_have_css("background-color", light)
    page.get_by_role("button", name="Light").click()
    expect(body).to_have_css("background-color", light)
    page.keyboard.press("Escape")
    page.locator(".topmenu > summary").click()
    window.shoot(page, "topmenu-390", full=False)
    page.locator(".topmenu").get_by_role("link", name="Spend").click()
    expect(page.get_by_role("heading", name="Spend", level=1)).to_be_visible()
