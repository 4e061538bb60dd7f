"""The full path of a user: sign in, submit the form, watch the curve grow, stop the run.

Uses a real server with broker, worker and beat, and replica processes that train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import Window, eventually, opened_window
from tests.browser.submit_page import open_section

if TYPE_CHECKING:
    from tests.stack import LiveStack

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.slow(minutes=1)]


@pytest.fixture
def window(browser: Browser, live_stack: LiveStack) -> Iterator[Window]:
    with opened_window(browser, live_stack, "end-to-end") as window:
        yield window


def test_submit_watch_stop(window: Window, live_stack: LiveStack) -> None:
    page = window.open("/runs/new", user="operator")
    page.get_by_label("Name", exact=True).fill("From the form")
    page.get_by_role("radio", name="demo").check()
    page.get_by_role("spinbutton", name="Replicas").fill("2")
    page.get_by_label("Local steps (H)").fill("10")
    page.get_by_label("Rounds", exact=True).fill("500")
    page.get_by_label("Batch size").fill("2")
    open_section(page, "Inner optimizer and schedule")
    page.get_by_label("Warm-up", exact=True).fill("10")
    page.get_by_role("button", name="Launch").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("From the form")
    begun = page.get_by_text("Starting up").or_(page.get_by_text("Evaluation loss"))
    expect(begun.first).to_be_visible()
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    window.shoot(page, "end-to-end-launched")

    # The following happens on this page without a reload.
    state = page.locator('[data-s="state"]')
    expect(state).to_have_text("running")
    committed = page.locator('[data-s="rounds"]')
    expect(committed).to_have_text(re.compile(r"^[3-9]$|^\d\d+$"))
    expect(page.locator('[data-s="eval_loss"]')).to_have_text(re.compile(r"^\d\.\d{3}$"))
    expect(page.locator('[data-plot="loss"] .u-wrap canvas')).to_be_visible()
    expect(page.locator("[data-checklist]")).to_be_hidden()
    page.locator('[data-plot="loss"] [data-table]').click()
    newest = page.locator('[data-plot="loss"] [data-chart-table] tbody tr').last.locator("th")
    expect(newest).to_have_text(re.compile(r"^[1-9]"))

    def step() -> int:
        return int(newest.inner_text().replace(",", ""))

    seen = step()
    eventually(page, step, lambda newer: newer > seen)  # the curve grows
    page.locator('[data-plot="loss"] [data-table]').click()
    expect(page.locator('[data-replicas="short"] tbody tr')).to_have_count(2)
    window.shoot(page, "end-to-end-running")

    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name="Stop run").click()
    expect(state).to_have_text("cancelled")
    expect(page.get_by_text("Result", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()
    ended = page.locator('[data-replicas="short"] tbody .state').filter(has_text="done")
    expect(ended).to_have_count(2)
    window.shoot(page, "end-to-end-stopped")

    # System usage was measured, and the weights can be downloaded.
    page.get_by_role("link", name="System").click()
    for name, unit in (("memory", " MB"), ("cpu", "."), ("up", "B/s"), ("bytes_down", "B")):
        value = page.locator(f'[data-panel="system"] [data-plot="{name}"] [data-id="r0"] output')
        expect(value).to_contain_text(unit)
        expect(value).to_contain_text(re.compile(r"[1-9]"))
    gpu = page.locator('[data-plot="gpu"] [data-chart]')
    expect(gpu).to_have_attribute("data-empty", "The run ended without data for this chart")
    window.shoot(page, "end-to-end-system")
    page.get_by_role("link", name="Checkpoints").click()
    final = page.locator("table.checkpoints tbody tr", has_text="Final")
    with page.expect_download() as download:
        final.get_by_role("link", name="Download").click()
    assert download.value.path().stat().st_size > 1_000_000
    window.shoot(page, "end-to-end-checkpoints")
    page.get_by_role("link", name="Replicas", exact=True).click()
    page.get_by_role("link", name="Replica 1").last.click()
    expect(page.locator("svg.phase-strip")).to_be_visible()
    expect(page.locator('[data-plot="step_s"] [data-id="r1"] output')).to_contain_text("s")
    window.shoot(page, "end-to-end-replica")
    page.go_back()

    # The group settings equal the form and are read-only.
    page.get_by_role("link", name="Settings").click()
    panel = page.get_by_role("region", name="Settings")
    expect(
        panel.get_by_role("definition").filter(has_text=re.compile(r"^500 rounds$"))
    ).to_be_visible()
    expect(panel.locator("input, select, textarea")).to_have_count(0)
    page.goto("/")
    expect(page.get_by_role("link", name="From the form")).to_be_visible()
