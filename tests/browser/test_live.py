"""Live pages: deltas, polling as the fallback, charts, and state in the address."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import (
    BLANK,
    NO_SHARED_WORKER,
    QUICK_TIMERS,
    Site,
    Window,
    expect_address,
    tab_to,
)

pytestmark = pytest.mark.browser


@pytest.fixture
def demo(site: Site) -> str:
    return site.seed("name='Watched', committed=6")


def is_live(page: Page) -> None:
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")


def replica(**changes: Any) -> dict[str, Any]:
    row = {
        "number": 0,
        "state": "uploading",
        "state_reason": "",
        "backend": "local",
        "backend_state": "running",
        "beat_at": None,
        "beat_interval_s": 2.0,
        "round": 7,
        "step": 300,
        "tokens": 300_000,
        "loss": 1.234,
        "tokens_per_s": 5000.0,
        "wait_fraction": 0.05,
        "restarts": 0,
        "device": "cpu",
        "host": "h",
        "incarnation": "i",
    }
    return row | changes


def test_only_late_data_has_an_age(window: Window, site: Site, demo: str) -> None:
    """Replicas report every 15 s, so that younger data is up to date."""
    page = window.open(f"/runs/{demo}/", alone=True)
    is_live(page)
    now = datetime.now(UTC)
    page.clock.set_fixed_time(now)
    connection = page.locator("[data-conn]")

    def seen(seconds: float, state: str = "running") -> None:
        then = (now - timedelta(seconds=seconds)).isoformat()
        site.python(  # a poll, for example after a lost stream, has the same
            "from runs.models import Run\n"
            f"Run.objects.filter(pk='{demo}').update(last_seen_at='{then}', state='{state}')"
        )
        site.publish(demo, run={"last_seen_at": then, "state": state})

    for seconds, state, text in (
        (45, "running", "No data for 45 s"),
        (25, "running", "Live"),
        (100, "running", "No data for 1 min"),
        (100, "paused", "Live"),
    ):
        seen(seconds, state)
        expect(connection).to_have_text(text)
        expect(page.locator("[data-conn][data-late]")).to_have_count(int(text != "Live"))


def test_delta_updates_values_and_keeps_elements(window: Window, site: Site, demo: str) -> None:
    page = window.open(f"/runs/{demo}/")
    is_live(page)
    row = page.locator('[data-replicas="short"] tbody tr').first
    row.evaluate("node => (node.mark = true)")
    site.publish(
        demo,
        run={"committed_rounds": 7, "eval_loss": 1.111, "state": "degraded", "state_reason": "why"},
        replicas=[replica()],
        events=[
            {
                "id": 10**9,
                "at": "2026-01-01T00:00:00Z",
                "level": "warning",
                "kind": "x",
                "replica": None,
                "actor": None,
                "from_state": "running",
                "to_state": "degraded",
                "message": "one is missing",
            }
        ],
    )
    expect(page.locator('[data-s="eval_loss"]')).to_have_text("1.111")
    expect(page.locator('[data-s="rounds"]')).to_have_text("7")
    expect(page.locator('[data-s="state"]')).to_have_text("degraded")
    expect(page.locator('[data-s="why"]')).to_have_text("why")
    expect(row.locator('[data-c="loss"]')).to_have_text("1.234")
    expect(row.locator('[data-c="state"] .state')).to_have_text("uploading")
    expect(page.locator(".events li").first).to_contain_text("one is missing")
    assert row.evaluate("node => node.mark === true"), "the row was replaced"


def test_curve_grows_with_new_points(window: Window, site: Site, demo: str) -> None:
    page = window.open(f"/runs/{demo}/?smooth=0")
    is_live(page)
    value = page.locator('[data-plot="loss"] [data-id="r0"] output')
    expect(value).not_to_have_text("–")
    for step in (252, 252, 253):  # a step sent twice has the newest value
        site.publish(
            demo,
            points=[
                {
                    "series": "loss",
                    "replica": 0,
                    "step": [step],
                    "round": [7],
                    "tokens": [step * 1024],
                    "wall_s": [time.time()],
                    "value": [step / 1000],
                    "total": step,
                    "nonfinite": [],
                }
            ],
        )
    expect(value).to_have_text("0.253")
    page.get_by_role("button", name="Table").first.click()
    last = page.locator('[data-plot="loss"] [data-chart-table] tbody tr').last
    expect(last.locator("th")).to_have_text("253")


def test_a_new_point_redraws_only_the_charts_that_show_it(
    window: Window, site: Site, demo: str
) -> None:
    page = window.open(f"/runs/{demo}/?smooth=0")
    is_live(page)
    for name in ("norm", "cosine", "update", "speed", "goodput"):  # all of them are drawn
        expect(page.locator(f'[data-plot="{name}"] [data-id] output').first).not_to_have_text("–")
    value = page.locator('[data-plot="loss"] [data-id="r0"] output')
    expect(value).not_to_have_text("–")
    page.evaluate(
        """() => {
            window.redrawn = new Set();
            const clear = CanvasRenderingContext2D.prototype.clearRect;
            CanvasRenderingContext2D.prototype.clearRect = function (...box) {
                redrawn.add(this.canvas.closest("[data-plot]")?.dataset.plot);
                return clear.apply(this, box);
            };
        }"""
    )
    point = {"step": [9000], "round": [7], "tokens": [9_216_000], "wall_s": [time.time()]}
    point |= {"series": "loss", "replica": 0, "value": [0.125], "total": 9000, "nonfinite": []}
    site.publish(demo, points=[point])
    expect(value).to_have_text("0.125")
    assert page.evaluate("[...redrawn].filter(Boolean)") == ["loss"]  # the strip is no plot


def test_a_request_without_an_answer_ends_after_30_s_and_is_sent_again(
    window: Window, demo: str
) -> None:
    page = window.open(BLANK, alone=True)
    page.clock.install()
    held: list[Route] = []
    page.route("**/snapshot.json?*", lambda route: held.append(route))
    with page.expect_request("**/snapshot.json?*"):
        page.goto(f"/runs/{demo}/")
    with page.expect_event("requestfailed", lambda request: "snapshot" in request.url):
        page.clock.fast_forward(30_000)
    page.unroute("**/snapshot.json?*")
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "offline")
    page.clock.fast_forward(5_000)
    page.clock.resume()
    is_live(page)
    expect(page.locator('[data-s="rounds"]')).not_to_have_text("–")


def test_without_a_stream_the_page_polls(window: Window, site: Site, demo: str) -> None:
    """Offline while every poll fails, and live once there is a stream."""
    page = window.open(BLANK)
    page.add_init_script(QUICK_TIMERS + NO_SHARED_WORKER)
    page.route("**/stream?*", lambda route: route.abort())
    page.goto(f"/runs/{demo}/")
    dot = page.locator("[data-conn]")
    expect(dot).to_have_attribute("data-state", "polling")
    expect(dot).to_have_text("Polling every 5 s")
    page.route("**/snapshot.json?*", lambda route: route.abort())
    expect(dot).to_have_text(re.compile(r"^Offline, last update \d+ s ago$"))
    expect(dot).to_have_attribute("data-state", "offline")
    with page.expect_event("requestfailed", lambda request: "snapshot" in request.url):
        pass  # another failed poll
    expect(dot).to_have_attribute("data-state", "offline")
    window.shoot(page, "run-offline", full=False)
    site.python(
        "from runs.models import Replica, Run\n"
        f"Run.objects.filter(pk='{demo}').update(eval_loss=0.5)\n"
        f"Replica.objects.filter(run='{demo}', number=1).update(state='failed')"
    )
    page.unroute("**/snapshot.json?*")
    expect(dot).to_have_attribute("data-state", "polling")
    expect(page.locator('[data-s="eval_loss"]')).to_have_text("0.500")
    findings = page.get_by_role("region", name="Findings")
    expect(findings).to_contain_text("replica 1 failed")
    page.unroute("**/stream?*")
    is_live(page)
    window.errors.clear()  # the aborted requests


def test_offline_before_the_first_snapshot(window: Window, demo: str) -> None:
    """Also Back raises no exception then, for which `window` fails."""
    page = window.open(BLANK)
    page.add_init_script(QUICK_TIMERS)
    page.route("**/snapshot.json?*", lambda route: route.abort())
    page.goto(f"/runs/{demo}/")
    page.evaluate("dispatchEvent(new PopStateEvent('popstate'))")
    page.evaluate("new Promise(requestAnimationFrame)")
    expect(page.locator("[data-conn]")).to_contain_text("Offline, last update")
    page.unroute("**/snapshot.json?*")
    is_live(page)
    window.errors[:] = [error for error in window.errors if "ERR_FAILED" not in error]


def test_expired_session_shows_a_sign_in_link(window: Window, demo: str) -> None:
    page = window.open(BLANK)
    page.add_init_script(QUICK_TIMERS + NO_SHARED_WORKER)
    page.route("**/stream?*", lambda route: route.abort())
    page.goto(f"/runs/{demo}/")
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "polling")
    page.context.clear_cookies()
    # With the next poll.
    expect(page.locator("[data-conn]")).to_contain_text("Signed out: sign in again")
    page.goto(BLANK)  # no request fails any more
    window.errors.clear()


def test_list_updates_rows_and_offers_new_ones(window: Window, site: Site, demo: str) -> None:
    page = window.open("/")
    is_live(page)
    row = page.locator(f'[data-run="{demo}"]')
    header = {
        "id": demo,
        "state": "stalled",
        "live": 2,
        "target": 4,
        "committed_rounds": 9,
        "total_rounds": 20,
        "eval_loss": 1.5,
        "train_loss": 1.4,
        "tokens": 5,
        "tokens_per_s": 1.0,
        "started_at": "2026-01-01T00:00:00Z",
        "ended_at": None,
    }
    site.publish(demo, run=header)
    expect(row.locator(".state")).to_have_text("stalled")
    expect(row.locator('[data-f="rounds"]')).to_have_text("9/20")
    expect(row.locator('[data-f="replicas"]')).to_have_text("2/4")
    before = page.locator("[data-run]").count()
    new = site.seed("name='Brand new', committed=1")
    site.python(
        "from django.utils import timezone\nfrom runs.models import Run\n"
        f"Run.objects.filter(pk='{new}').update(created_at=timezone.now())"
    )
    site.publish(new, run=header | {"id": new, "created_at": "2100-01-01T00:00:00Z"})
    pill = page.get_by_role("button", name="1 new")
    expect(pill).to_be_visible()
    expect(page.locator("[data-run]")).to_have_count(before)  # no row moves without a click
    pill.click()
    expect(page.get_by_role("link", name="Brand new")).to_be_visible()


def test_a_page_without_a_position_shows_what_changed_before_its_stream(
    window: Window, site: Site, demo: str
) -> None:
    """The server rendered it while Redis was unavailable."""
    page = window.open(BLANK)
    before = re.sub(r' data-cursor="[^"]*"', "", page.request.get("/").text())
    site.python(
        f"from runs.models import Run; Run.objects.filter(pk='{demo}').update(eval_loss=0.125)"
    )

    def rendered_before(route: Route) -> None:
        if route.request.is_navigation_request():
            route.fulfill(body=before, content_type="text/html")
        else:
            route.continue_()

    page.route(re.compile(r"^http://[^/]+/$"), rendered_before)
    page.goto("/")
    is_live(page)
    loss = page.locator(f'[data-run="{demo}"] [data-f="eval_loss"]')
    expect(loss).to_have_text("0.125")


def test_address_keeps_axis_smoothing_and_tab(window: Window, demo: str) -> None:
    page = window.open(f"/runs/{demo}/")
    is_live(page)
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_role("slider", name="Smoothing").fill("0.5")
    page.locator('[data-plot="loss"] [data-id="band"]').click()
    expect_address(page, "x=tokens", "smooth=0.5", "hide=loss.band")
    page.reload()
    expect(page.get_by_role("button", name="Tokens", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    expect(page.locator('[data-plot="loss"] [data-id="band"]')).to_have_attribute(
        "aria-pressed", "false"
    )
    expect(page.get_by_role("slider", name="Smoothing")).to_have_value("0.5")
    page.get_by_role("link", name="Settings").click()
    expect(page.get_by_role("region", name="Settings")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("region", name="Overview")).to_be_visible()


def test_charts_and_heatmap_by_keyboard(window: Window, demo: str) -> None:
    page = window.open(f"/runs/{demo}/")
    is_live(page)
    chart = page.locator('[data-plot="loss"] [data-chart]')
    expect(chart.locator("canvas")).to_be_visible()
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator('[data-plot="loss"] [data-announce]')).to_contain_text("Evaluation")
    shares = page.locator('[data-plot="goodput"] [data-chart]')
    shares.scroll_into_view_if_needed()  # it is drawn once it is in sight
    expect(shares.locator("canvas")).to_be_visible()
    expect(shares).not_to_have_attribute("data-empty", "Loading")
    shares.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator('[data-plot="goodput"] [data-announce]')).to_contain_text("compute 8")

    page.get_by_role("link", name="Rounds", exact=True).click()
    heat = page.locator('[data-heatmap="large"]')
    expect(heat.locator(".heat-announce")).to_contain_text("6 of 20 rounds")
    heat.locator("canvas").first.focus()
    page.keyboard.press("ArrowLeft")
    expect(heat.locator(".heat-announce")).to_contain_text("Round 7, replica 0: uploaded")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    expect(heat.locator(".heat-announce")).to_contain_text("Round 6, replica 1: included")
    page.keyboard.press("Enter")
    detail = page.locator("[data-round-detail]")
    expect(detail.get_by_role("heading", name="Round 6")).to_be_visible()
    expect_address(page, "round=6")
    detail.get_by_role("button", name="Previous round").click()
    expect(detail.get_by_role("heading", name="Round 5")).to_be_visible()


@pytest.mark.slow
def test_a_run_is_stopped_by_keyboard_alone(window: Window, site: Site, demo: str) -> None:
    page = window.open(f"/runs/{demo}/")
    is_live(page)
    stop = page.get_by_role("button", name="Stop", exact=True)
    tab_to(page, stop)
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("6 of 20")
    window.shoot(page, "stop-dialog", full=False)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(stop).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    tab_to(page, page.get_by_role("button", name="Stop run"))
    with page.expect_navigation():
        page.keyboard.press("Enter")
    is_live(page)
    expect(page.locator('[data-s="state"]')).to_have_text("stopping")
    tab_to(page, stop)
    page.keyboard.press("Space")  # a second stop, by force
    expect(page.get_by_role("radio", name="Stop the machines now")).to_be_checked()
    tab_to(page, page.get_by_role("button", name="Stop run"))
    page.keyboard.press("Space")
    expect(page.locator('[data-s="why"]')).to_have_text("stopped by force by olga")
