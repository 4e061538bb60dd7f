"""The planner: the address holds the input, and the chart selects H."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Window, expect_address

pytestmark = pytest.mark.browser

PLAN = (
    "/planner?parameters=1B&num_replicas=8&sync_every=100&codec=bf16&step_s=1"
    "&tokens_per_step=65536&tokens=20B&mtbf_h=24&usd_h=2"
)


def test_layout(window: Window) -> None:
    page = window.open(PLAN, width=360)
    expect(page.locator("[data-chart] canvas")).to_be_visible()
    window.fits(page, "planner", 360, 800, 1440, 360)


def test_arrow_keys_select_h_and_update_the_address(window: Window) -> None:
    page = window.open(PLAN)
    expect(page.locator("[data-chart] canvas")).to_be_visible()
    before = page.locator('[data-p="wall_s"]').inner_text()
    page.locator("[data-chart]").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    local_steps = page.get_by_label("Local steps (H)", exact=True)
    expect(local_steps).not_to_have_value("100")
    expect(page.locator('[data-p="wall_s"]')).not_to_have_text(before)
    chosen = int(local_steps.input_value())
    assert chosen > 100
    expect_address(page, f"sync_every={chosen}")
    shown = page.locator('[data-p="efficiency"]').inner_text()
    page.reload()
    expect(page.locator('[data-p="efficiency"]')).to_have_text(shown)
    expect(local_steps).to_have_value(str(chosen))


def test_chart_and_button_best_select_h_and_errors_are_shown_at_their_field(window: Window) -> None:
    page = window.open(PLAN)
    expect(page.locator("[data-chart] canvas")).to_be_visible()
    page.locator("[data-chart] .u-over").click(position={"x": 60, "y": 100})
    local_steps = page.get_by_label("Local steps (H)", exact=True)
    expect(local_steps).to_have_value(re.compile(r"^\d{1,2}$"))
    page.locator("[data-best]").click()
    expect(page.locator("[data-best]")).to_be_hidden()
    local_steps.fill("100")
    page.get_by_label("Overlap").fill("100")
    expect(page.get_by_text("expected less than the 100 local steps")).to_be_visible()
    expect(page.locator("[data-out][data-stale]")).to_have_count(1)
    page.get_by_label("Overlap").fill("5")
    expect(page.get_by_text("expected less than the 100 local steps")).to_be_hidden()
    expect(page.locator("[data-out][data-stale]")).to_have_count(0)
