"""What charts show for values that are not there: replicas that have not reported yet, NaN, ended
runs."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import BLANK, Site, Window, eventually, expect_address

pytestmark = pytest.mark.browser

DIVERGED = """
import math
from runs.metrics.blocks import Points
from runs.metrics.downsampling import add_points
from runs.models import Run
run = Run.objects.get(pk={run!r})
begun = run.first_step_at.timestamp()
steps = list(range(252, 420))
for replica in run.replicas.all():
    values = [2.2 * math.exp((s - 252) / 10) if s < 305 else math.nan for s in steps]
    add_points(run, replica, {{"loss": Points.of(
        step=steps, round=[7] * len(steps), tokens=steps,
        wall_s=[begun + s * 0.19 for s in steps], value=values)}}, key="step")
"""
WRITTEN = """
const fillText = CanvasRenderingContext2D.prototype.fillText;
window.written = [];
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    window.written.push(text);
    return fillText.call(this, text, ...place);
};
"""
NUMBER = re.compile(r"^\d+\.\d+$")
"""Init script: `written` has every text that is drawn on a canvas."""


def legend(page: Page, line: str) -> Locator:
    return page.locator(f'[data-plot="loss"] [data-id="{line}"] output')


def expect_mean(page: Page, least: float, most: float) -> None:
    mean = legend(page, "mean")
    expect(mean).to_have_text(NUMBER)
    eventually(page, lambda: float(mean.inner_text()), lambda value: least <= value <= most)


def points(replica: int, step: int, value: float | None, **more: Any) -> dict[str, Any]:
    return {
        "series": "loss",
        "replica": replica,
        "step": [step],
        "round": [7],
        "tokens": [step * 1024],
        "wall_s": [time.time()],
        "value": [value],
        "total": step,
        "nonfinite": [],
    } | more


def test_a_step_of_one_replica_counts_with_the_newest_values_of_the_others(
    window: Window, site: Site
) -> None:
    run = site.seed("name='First to report', committed=6")
    page = window.open(BLANK)
    page.add_init_script(WRITTEN)
    page.goto(f"/runs/{run}/?smooth=0")
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    for line in ("r1", "r2", "r3"):
        expect(legend(page, line)).to_have_text(NUMBER)
    others = [float(legend(page, line).inner_text()) for line in ("r1", "r2", "r3")]
    site.publish(run, points=[points(0, 253, 1.0)])
    expect(legend(page, "r0")).to_have_text("1.000")
    expect(legend(page, "band")).to_have_text(f"1.000 – {max(others):.3f}")
    mean = (1 + sum(others)) / 4
    expect_mean(page, mean - 2e-3, mean + 2e-3)
    site.publish(run, points=[points(1, 253, 0.5)])
    expect(legend(page, "band")).to_have_text(re.compile("^0.500 – "))
    mean = (1.5 + sum(others[1:])) / 4
    expect_mean(page, mean - 2e-3, mean + 2e-3)
    # NaN is shown until a finite value follows.
    site.publish(run, points=[points(0, 254, None, nonfinite=[[0, "nan"]])])
    expect(legend(page, "r0")).to_have_text("NaN")
    site.publish(run, points=[points(0, 255, 1.537)])
    expect(legend(page, "r0")).to_have_text("1.537")
    # The line of a highlighted replica has the newest value at its end.
    highlighted = page.get_by_role("group", name="Highlighted replicas")
    page.evaluate("written.length = 0")
    highlighted.get_by_role("button", name="Replica 0").click()
    eventually(page, lambda: page.evaluate("written"), lambda drawn: "1.537" in drawn)


def test_the_smoothed_mean_is_within_the_band(window: Window, site: Site) -> None:
    run = site.seed("name='Falling', committed=6")
    page = window.open(f"/runs/{run}/?smooth=0.9")
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    band, mean = legend(page, "band"), legend(page, "mean")
    expect(band).to_have_text(re.compile(r"^\d"))
    before = band.inner_text()
    for replica in range(4):  # far below all values before
        site.publish(run, points=[points(replica, 253, 0.1 + replica / 100)])
    expect(band).not_to_have_text(before)

    def lowest_mean_highest() -> list[float]:
        low, high = band.inner_text().split(" – ")
        return [float(text) for text in (low, mean.inner_text(), high)]

    eventually(page, lowest_mean_highest, lambda values: values == sorted(values))


def test_a_diverged_loss_is_nan_and_leaves_the_axis_to_the_other_values(
    window: Window, site: Site
) -> None:
    run = site.seed("name='Diverged', committed=6")
    site.python(DIVERGED.format(run=run))
    page = window.open(BLANK)
    page.add_init_script(WRITTEN)
    page.goto(f"/runs/{run}/?smooth=0")
    clip = page.get_by_role("button", name="Clip outliers")
    expect(clip).to_have_attribute("aria-pressed", "true")
    expect(page.locator("[data-clip-out]").first).to_have_text(re.compile(r"^[1-9]\d* clipped$"))
    for line in ("band", "mean", "r0", "r3"):
        expect(legend(page, line)).to_have_text("NaN")
    expect(legend(page, "eval")).to_have_text(re.compile(r"^[0-2]\.\d+$"))
    window.shoot(page, "charts-diverged", full=False)
    chart = page.locator('[data-plot="loss"] [data-chart]')
    chart.focus()
    page.evaluate("written.length = 0")
    page.get_by_role("button", name="log y").click()
    eventually(page, lambda: page.evaluate("written"), lambda drawn: drawn.count("NaN") == 1)
    page.get_by_role("button", name="log y").click()
    page.evaluate("written.length = 0")
    clip.click()
    expect(clip).to_have_attribute("aria-pressed", "false")
    eventually(page, lambda: page.evaluate("written"), lambda drawn: "400" in drawn)
    expect_address(page, "clip=0")
    page.reload()
    expect(page.locator('[data-plot="loss"] [data-id="r0"] output')).to_have_text("NaN")
    expect(clip).to_have_attribute("aria-pressed", "false")


def test_ended_runs_do_not_announce_data(window: Window, site: Site) -> None:
    run = site.seed("name='Never began', committed=0, state='failed', reason='bad bucket'")
    page = window.open(f"/runs/{run}/")
    expect(page.locator('[data-plot="loss"] [data-chart]')).to_have_attribute(
        "data-empty", "The run ended without data for this chart"
    )
    expect(page.locator('[data-heatmap="small"] .heat-announce')).to_have_text("No rounds")
    page.get_by_role("link", name="Timeline").click()
    expect(page.locator("[data-timeline] [data-chart]")).to_have_attribute(
        "data-empty", "The run ended before a replica finished a round"
    )
    page.get_by_role("link", name="Rounds", exact=True).click()
    expect(page.locator("[data-rounds-table]")).to_contain_text("No rounds.")
    page.get_by_role("link", name="System").click()
    expect(page.locator('[data-plot="memory"] [data-chart]')).to_have_attribute(
        "data-empty", "The run ended without data for this chart"
    )


def test_running_runs_announce_data(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{site.seed('committed=0')}/")
    expect(page.locator('[data-plot="loss"] [data-chart]')).to_have_attribute(
        "data-empty", "Data appears after the first step"
    )
    expect(page.locator('[data-heatmap="small"] .heat-announce')).to_have_text("No rounds yet")
