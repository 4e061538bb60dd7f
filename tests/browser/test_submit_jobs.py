"""Jobs that people come to the submit form for."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Site, Window, overflow
from tests.browser.submit_page import open_section

pytestmark = pytest.mark.browser


def test_a_pasted_document_fills_the_form_with_errors_at_their_fields(window: Window) -> None:
    page = window.open("/runs/new")
    open_section(page, "Source")
    page.get_by_label("Document", exact=True).fill(
        "name: From YAML\nsettings:\n  sync_every: 0\n  nothing: 1\npools:\n  - count: 2\n"
    )
    page.get_by_role("button", name="Use the document").click()
    expect(page.get_by_label("Name", exact=True)).to_have_value("From YAML")
    expect(page.locator("#id_sync_every_error")).to_contain_text("Expected 1 or more, found 0")
    expect(page.locator("#id_document_error")).to_contain_text(
        "settings.nothing: expected no such field"
    )
    window.shoot(page, "submit-pasted")


def test_a_sweep_is_launched_from_the_form_and_ranked(window: Window, site: Site) -> None:
    page = window.open("/runs/new")
    page.get_by_label("Name", exact=True).fill("Rates")
    open_section(page, "Sweep")
    page.get_by_label("Values", exact=True).fill("inner_lr = 1e-4..1e-2 x3 log\nnothing = 1")
    page.keyboard.press("Tab")
    expect(page.locator("#id_sweep_error")).to_contain_text("Expected a group setting")
    page.get_by_label("Values", exact=True).fill("inner_lr = 1e-4..1e-2 x3 log")
    page.get_by_label("Runs at a time").fill("1")
    launch = page.get_by_role("button", name="Launch 3 runs").first
    expect(launch).to_be_visible()
    expect(page.locator("[data-sweep-usd]")).to_contain_text("for 3 runs")
    window.shoot(page, "submit-sweep")
    launch.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Rates")
    rows = page.get_by_role("row").filter(has_text="Rates · inner_lr")
    expect(rows).to_have_count(3)
    expect(page.get_by_text("Waiting for its turn")).to_have_count(2)
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    run = site.python(
        "from runs.models import Run\n"
        "for index, loss in enumerate((3.5, 2.25, 2.75)):\n"
        "    Run.objects.filter(sweep__name='Rates', sweep_index=index).update(eval_loss=loss)\n"
        "print(Run.objects.filter(sweep__name='Rates').first().pk)"
    )
    site.publish(run, run={"id": run})  # the page follows, without a reload
    expect(rows.first).to_contain_text("2.25")
    expect(rows.first).to_contain_text("0.001")
    expect(page.locator(".scatter circle")).to_have_count(3)
    address = page.url
    for width, scheme in ((1440, "light"), (390, "dark")):
        shot = window.open(address, width=width, scheme=scheme)
        window.shoot(shot, f"sweep-{width}-{scheme}")
        assert overflow(shot) <= 0
        too_wide = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth + 1).length"
        assert shot.locator(".ranking tbody :is(td, th)").evaluate_all(too_wide) == 0
    page.locator("summary", has_text="Stop all").click()
    page.get_by_role("button", name="Stop 3 runs").click()
    expect(page.get_by_text("Rates: stopping 3 runs.")).to_be_visible()
