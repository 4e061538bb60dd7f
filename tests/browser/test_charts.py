"""Charts: zooming samples again, extremes are kept, and the address holds the view."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import (
    BLANK,
    CUT_TEXTS,
    Site,
    Window,
    eventually,
    expect_address,
    next_frame,
)

pytestmark = pytest.mark.browser

LONG = """
import math
from runs.metrics.blocks import Points
from runs.metrics.downsampling import add_points
from runs.models import Run
run = Run.objects.get(pk={run!r})
steps = list(range(40_000))
values = [2 + 3 * math.exp(-s / 5000) + 0.05 * math.sin(s * 1.7) for s in steps]
values[12_345], values[30_000] = 9.0, float("nan")
points = Points.of(step=steps, round=[s // 40 for s in steps], tokens=[512 * s for s in steps],
                   wall_s=[1.75e9 + s for s in steps], value=values)
add_points(run, run.replicas.get(number=0), {{"loss": points}}, key="step")
"""


@pytest.fixture(scope="module")
def long(site: Site) -> str:
    """A run of one replica with 40,000 losses, among them one spike and one NaN."""
    run = site.seed("name='Long', committed=3, replicas=1")
    site.python(LONG.format(run=run))
    return run


def zoom(page: Page, begin: float, end: float) -> None:
    """Drag over the loss chart; ``begin`` and ``end`` are fractions of its width."""
    box = page.locator('[data-plot="loss"] .u-over').bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], y, steps=4)
    page.mouse.up()


def test_the_toolbar_sticks_below_the_top_bar(window: Window, long: str) -> None:
    page = window.open(f"/runs/{long}/")
    bar, top = page.locator("[data-board]").first, page.locator(".topbar")
    expect(page.locator('[data-plot="loss"] .u-over')).to_be_visible()
    page.locator('[data-plot="goodput"]').scroll_into_view_if_needed()
    page.mouse.move(400, 600)
    page.mouse.wheel(0, 300)
    expect(bar).to_be_in_viewport(ratio=1)
    above, box = top.bounding_box(), bar.bounding_box()
    assert above is not None
    assert box is not None
    assert above["y"] == 0
    assert box["y"] >= above["height"]
    bar.get_by_role("button", name="log y").click()  # fails if something covers it


def test_a_zoom_requests_more_points_and_is_undone(window: Window, long: str) -> None:
    """By the buttons of the toolbar, and by Back of the browser."""
    page = window.open(f"/runs/{long}/?smooth=0")
    note = page.locator('[data-plot="loss"] [data-badge]')
    back = page.get_by_role("button", name="Back")
    expect(note).to_contain_text("of 40,004 points (extremes kept) · 1 NaN")
    window.shoot(page, "charts-long")
    with page.expect_response(lambda r: "series.json" in r.url and "from=" in r.url):
        zoom(page, 0.3, 0.31)
    expect(note).to_have_text(re.compile(r"^\d{3} points$"))
    expect_address(page, "from=")
    expect(back).to_be_enabled()
    window.shoot(page, "charts-zoomed")
    page.reload()
    expect(note).to_have_text(re.compile(r"^\d{3} points$"))
    page.get_by_role("button", name="Show all").click()
    expect(note).to_contain_text("of 40,004 points")
    expect(page).not_to_have_url(re.compile("from="))

    zoom(page, 0.2, 0.6)
    expect(note).not_to_contain_text("of 40,004")
    first = page.url
    zoom(page, 0.4, 0.5)
    expect(page).not_to_have_url(first)
    page.get_by_role("slider", name="Smoothing").fill("0.5")  # not a step of the history
    page.go_back()
    expect(page).to_have_url(first)
    page.go_back()
    expect(note).to_contain_text("of 40,004")
    expect(back).to_be_disabled()
    page.go_forward()
    expect(page).to_have_url(first)
    expect(note).not_to_contain_text("of 40,004")

    zoom(page, 0.4, 0.5)
    expect(page).not_to_have_url(first)
    back.click()
    expect(page).to_have_url(first)
    page.get_by_role("button", name="Later", exact=True).click()
    expect(page).not_to_have_url(first)
    page.get_by_role("button", name="Show all").click()
    expect(note).to_contain_text("of 40,004")


@pytest.mark.parametrize(("tab", "name"), [("timeline", "Closer"), ("rounds", "Zoom in")])
def test_the_back_of_the_browser_undoes_a_zoom_of(
    window: Window, site: Site, tab: str, name: str
) -> None:
    run = site.seed("name='Zoomed', committed=90, total_rounds=5000, sync_every=2")
    page = window.open(f"/runs/{run}/?tab={tab}")
    panel = page.get_by_role("region", name=tab.capitalize(), exact=True).first
    if tab == "timeline":
        expect(page.locator("[data-timeline] [data-badge]")).to_contain_text("bars")
    else:
        expect(page.locator('[data-heatmap="large"] .heat-announce')).to_contain_text("90 of")
    whole = page.url
    for _ in range(2):
        before = page.url
        panel.get_by_role("button", name=name).click()
        expect(page).not_to_have_url(before)
    for _ in range(2):
        page.go_back()
    expect(page).to_have_url(whole)
    if tab == "timeline":
        expect(page.locator("[data-timeline] [data-badge]")).to_contain_text("359 bars")


def test_spike_is_exported_and_outliers_can_be_clipped(window: Window, long: str) -> None:
    page = window.open(f"/runs/{long}/?smooth=0")
    expect(page.locator('[data-plot="loss"] [data-badge]')).to_contain_text("of 40,004")
    page.get_by_role("button", name="Clip outliers").click()
    expect(page.locator("[data-clip-out]").first).to_have_text(re.compile(r"^[1-9]\d* clipped$"))
    page.get_by_role("button", name="log y").click()
    page.get_by_role("button", name="log x").click()
    expect_address(page, "clip=1", "log=xy")
    window.shoot(page, "charts-log-clipped")
    with page.expect_download() as download:
        page.get_by_role("button", name="Loss as CSV").click()
    text = download.value.path().read_text()
    assert text.splitlines()[0] == "step,Replica 0,Evaluation"
    assert "12345,9," in text


@pytest.mark.slow
def test_crosshairs_move_together_every_axis_draws_and_every_chart_has_a_table(
    window: Window, site: Site
) -> None:
    run = site.seed("name='Axes', committed=12")
    page = window.open(BLANK)
    page.add_init_script(CUT_TEXTS)
    page.goto(f"/runs/{run}/?smooth=0")
    loss = page.locator('[data-plot="loss"]')
    expect(loss.locator(".u-wrap canvas")).to_be_visible()
    expect(page.locator('[data-plot="norm"] canvas').first).to_be_visible()
    norm = page.locator('[data-plot="norm"] [data-id="norm"] output')
    expect(norm).to_have_text(re.compile(r"\d"))
    at_end = norm.inner_text()
    loss.locator(".u-over").hover(position={"x": 200, "y": 100})
    expect(norm).not_to_have_text(at_end)
    for name in ("Round", "Tokens", "Time", "Relative", "Step"):
        with page.expect_response(lambda r: "series.json?of=loss" in r.url):
            page.get_by_role("button", name=name, exact=True).click()
    for chart in ("loss", "norm", "cosine", "update", "speed", "goodput"):
        card = page.locator(f'[data-plot="{chart}"]')
        expect(card.locator("canvas").first).to_be_visible()
        card.locator("[data-table]").click()
        expect(card.locator("[data-chart-table] tbody tr").last).to_be_visible()
    expect(page.locator('[data-plot="goodput"] tbody')).to_contain_text("8")
    assert page.evaluate("cut") == []
    window.shoot(page, "charts-tables")


def test_timeline_zooms_on_time_only_and_by_keyboard(window: Window, site: Site) -> None:
    run = site.seed("name='When', committed=12")
    page = window.open(f"/runs/{run}/?tab=timeline")
    timeline = page.locator("[data-timeline]")
    note, announce = timeline.locator("[data-badge]"), timeline.locator("[data-announce]")
    expect(note).to_contain_text("47 bars")
    expect(note).to_contain_text("critical path: replica 3")
    timeline.locator("canvas").first.hover(position={"x": 300, "y": 60})
    expect(announce).to_contain_text("Replica 1 at")
    window.fits(page, "timeline", 1440)
    for _ in range(2):
        page.get_by_role("button", name="Closer").click()
    expect(note).to_have_text(re.compile(r"^1\d bars"))
    expect_address(page, "from_s=")
    timeline.get_by_role("button", name="Table").click()
    expect(timeline.locator("tbody tr").first).to_be_visible()
    timeline.get_by_role("button", name="Table").click()
    timeline.get_by_role("button", name="Show all").click()
    expect(note).to_contain_text("47 bars")

    timeline.locator("[data-chart]").press("ArrowDown")
    expect(announce).to_contain_text("Replica 0 at")
    page.keyboard.press("+")
    expect(note).not_to_contain_text("47 bars")
    page.keyboard.press("Enter")
    expect(page.locator("[data-round-detail]")).to_be_visible()


def test_many_replicas_and_rounds_are_drawn_as_rasters(window: Window, site: Site) -> None:
    run = site.seed("name='Wide', committed=150, total_rounds=150, replicas=40, sync_every=2")
    page = window.open(f"/runs/{run}/?tab=timeline")
    expect(page.locator("[data-timeline] [data-badge]")).to_contain_text("raster of")
    window.shoot(page, "timeline-raster")
    page.get_by_role("link", name="Rounds", exact=True).click()
    heat = page.locator('[data-heatmap="large"]')
    expect(heat.locator(".heat-announce")).to_contain_text("150 of 150 rounds committed")
    heat.get_by_role("button", name="All rounds").click()
    window.shoot(page, "heatmap-raster")
    heat.locator("canvas").first.focus()
    page.keyboard.press("ArrowRight")
    expect(heat.locator(".heat-announce")).to_contain_text("Round 1, replica 0: included")


def test_rounds_narrower_than_a_few_pixels_are_a_raster(window: Window, site: Site) -> None:
    run = site.seed("name='Narrow', committed=500, total_rounds=500, replicas=2, sync_every=2")
    page = window.open(f"/runs/{run}/?tab=timeline")
    expect(page.locator("[data-timeline] [data-badge]")).to_contain_text("raster of")
    window.shoot(page, "timeline-narrow")


def test_rounds_outside_the_snapshot_are_fetched(window: Window, site: Site) -> None:
    run = site.seed("name='Older', committed=12")
    page = window.open(BLANK)
    page.route(
        re.compile("snapshot.json"),
        lambda route: route.fulfill(
            json=(body := route.fetch().json()) | {"rounds": body["rounds"][9:]}
        ),
    )
    with page.expect_response(lambda r: "heatmap.json?below=10" in r.url):
        page.goto(f"/runs/{run}/?tab=rounds")
    heat = page.locator('[data-heatmap="large"]')
    expect(heat.locator(".heat-announce")).to_contain_text("12 of 20 rounds")
    heat.locator("canvas").first.focus()

    def first() -> str:
        page.keyboard.press("Escape")
        page.keyboard.press("ArrowRight")
        next_frame(page)
        return heat.locator(".heat-announce").inner_text()

    eventually(page, first, lambda text: text.startswith("Round 1,"))
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(heat.locator(".heat-announce")).to_contain_text("Round 5, replica 1: refused")
    page.keyboard.press("Enter")
    detail = page.locator("[data-round-detail]")
    expect(detail.get_by_role("heading", name="Round 5")).to_be_visible()
    expect(detail).to_contain_text("expected crc32 5d01c2aa in block 3")
    detail.get_by_role("button", name="Previous round").click()
    expect(detail.get_by_role("heading", name="Round 4")).to_be_visible()


REQUESTS = """performance.getEntriesByType("resource")
    .filter(({ name }) => /(series|heatmap)\\.json/.test(name))
    .map(({ name, startTime, responseEnd }) => [name, startTime, responseEnd])"""


def test_the_first_chart_is_requested_before_the_others(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{site.seed('committed=6')}/")
    # Only requests that are answered are listed.
    listed = eventually(
        page,
        lambda: page.evaluate(REQUESTS),
        lambda listed: len(listed) > 4 and any("of=loss" in name for name, *_ in listed),
    )
    requests = sorted(listed, key=lambda request: request[1])
    (first, began, ended), *others = requests
    assert "of=loss" in first
    answered = min(ended, began + 1000) - 1  # a millisecond for the rounding of timers
    assert [name for name, at, _ in others if at < answered] == []
