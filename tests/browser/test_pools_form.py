"""Pool rows of the submit form: the fields of the backend, and the cost an hour."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Site, Window
from tests.browser.submit_page import open_section

pytestmark = pytest.mark.browser


def row(page: Page, number: int) -> Locator:
    return page.get_by_role("group", name=f"Pool {number}", exact=True)


def add(page: Page, backend: str) -> Locator:
    button = page.get_by_role("button", name="Add a pool")
    expect(button).to_be_visible()
    number = page.locator("[data-pool]").count() + 1
    button.click()
    new = row(page, number)
    new.get_by_label("Backend").select_option(backend)
    return new


def test_row_shows_the_fields_of_its_backend(window: Window) -> None:
    page = window.open("/runs/new")
    first = row(page, 1)
    for label in ("Credential", "Region", "Image", "Price", "Max price", "Spot"):
        expect(first.get_by_label(label, exact=label == "Price")).to_be_hidden()
    hardware = first.get_by_label("Hardware")
    expect(hardware).to_have_value("local:cpu")
    first.get_by_label("Backend").select_option("huggingface")
    expect(first.get_by_label("Credential")).to_be_visible()
    expect(first.get_by_label("Image")).to_be_visible()
    expect(first.get_by_label("Spot")).to_be_hidden()
    expect(hardware).to_have_value(re.compile("^huggingface:"))
    values = hardware.locator("option").evaluate_all("all => all.map((o) => o.value)")
    assert len(values) > 5
    assert all(value.startswith("huggingface:") for value in values)
    first.get_by_label("Backend").select_option("local")
    expect(first.get_by_label("Image")).to_be_hidden()


def test_price_and_errors_are_shown_at_their_row(window: Window) -> None:
    """The price can be entered where the backend has no price list."""
    page = window.open("/runs/new")
    pool = add(page, "kubernetes")
    expect(pool.get_by_label("Price", exact=True)).to_be_visible()
    expect(pool.locator("[data-pool-cost]")).to_have_text("cost unknown")
    expect(page.locator('[data-estimate] [data-e="usd_h"]')).to_have_text("unknown")
    pool.get_by_label("Price", exact=True).fill("1.25")
    pool.get_by_label("Replicas").fill("3")
    expect(pool.locator("[data-pool-cost]")).to_have_text("$3.75/h")
    expect(page.locator('[data-estimate] [data-e="usd_h"]')).to_have_text("$3.75")
    total = page.locator('[data-estimate] [data-e="usd_text"]')
    expect(total).to_contain_text("at most $1.88 in 30m 00s")
    expect(page.locator("[data-replicas-total]")).to_have_text("7 in total")
    deadline = pool.get_by_label("Job time limit")
    deadline.fill("90")
    deadline.blur()
    expect(pool.locator(".errors:visible")).to_contain_text(
        "Enter a duration such as 90m or 2h 30m, not '90'"
    )
    expect(deadline).to_have_attribute("aria-invalid", "true")
    expect(row(page, 1).locator(".errors:visible")).to_have_count(0)
    deadline.fill("90m")
    deadline.blur()
    expect(pool.locator(".errors:visible")).to_have_count(0)


def test_added_and_removed_rows_are_renumbered(window: Window) -> None:
    page = window.open("/runs/new")
    expect(page.get_by_role("button", name="Remove pool 1")).to_be_hidden()
    add(page, "kubernetes")
    add(page, "modal").get_by_label("Replicas").fill("9")
    expect(page.locator("[data-pool]").last.get_by_label("Backend")).to_have_value("modal")
    page.get_by_role("button", name="Remove pool 2").click()
    expect(page.locator("[data-pool]")).to_have_count(2)
    expect(row(page, 2).get_by_label("Backend")).to_have_value("modal")
    page.get_by_role("button", name="Remove pool 2").click()
    expect(page.get_by_role("button", name="Remove pool 1")).to_be_hidden()
    expect(page.get_by_role("button", name="Add a pool")).to_be_focused()


def test_results_of_test_buttons_appear_beside_button_and_field(window: Window) -> None:
    page = window.open("/runs/new")
    row(page, 1).get_by_role("button", name="Test").click()
    expect(row(page, 1).get_by_role("status")).to_contain_text("Works")
    open_section(page, "Bucket")
    rendezvous = page.locator("#s-bucket")
    rendezvous.get_by_role("button", name="Test").click()
    expect(rendezvous.get_by_role("status")).to_contain_text("Works: wrote, read, listed")
    rendezvous.get_by_label("Rendezvous", exact=True).fill("moon://crater/1")
    expect(rendezvous.get_by_role("status")).to_have_text("")
    rendezvous.get_by_role("button", name="Test").click()
    expect(rendezvous.get_by_role("status")).to_contain_text("See below")
    expect(page.locator("#id_rendezvous_error")).to_contain_text("found 'moon://crater/1'")
    rendezvous.get_by_label("Rendezvous", exact=True).fill("")
    expect(page.locator("#id_rendezvous_error")).to_be_hidden()


def test_folder_with_a_remote_pool_is_refused_before_the_launch(window: Window, site: Site) -> None:
    page = window.open("/runs/new")
    page.get_by_label("Name", exact=True).fill("Never launched")
    add(page, "kubernetes")
    page.get_by_role("button", name="Launch").click()
    summary = page.locator("[data-summary]")
    expect(summary).to_contain_text("expected a bucket that replicas on kubernetes can reach")
    expect(row(page, 2).get_by_label("Backend")).to_have_value("kubernetes")
    expect(page.get_by_label("Name", exact=True)).to_have_value("Never launched")
    # A new estimate must not clear the errors of checks that only the launch runs.
    expect(row(page, 2).locator("[data-pool-cost]")).to_have_text("cost unknown")
    error = page.locator("#id_rendezvous_error")
    expect(error).to_contain_text("Expected a bucket that replicas on kubernetes can reach")
    window.shoot(page, "submit-pools-errors")
    count = "from runs.models import Run; print(Run.objects.filter(name='Never launched').count())"
    assert site.python(count) == "0"
    page.get_by_role("button", name="Remove pool 2").click()
    expect(error).to_be_hidden()
    window.errors[:] = [e for e in window.errors if "422" not in e]


def test_many_pools_fit(window: Window) -> None:
    page = window.open("/runs/new", width=360)
    for backend in ("kubernetes", "sagemaker", "huggingface", "modal"):
        add(page, backend)
    expect(row(page, 5).get_by_label("Backend")).to_have_value("modal")
    for width in (360, 1440):
        window.fits(page, "page-new-pools", width)
        nameless = re.findall(
            r"^\s*- (?:button|link|textbox|combobox|spinbutton|checkbox)(?: \[[^\]]*\])*:?$",
            page.locator("body").aria_snapshot(),
            re.M,
        )
        assert nameless == [], width
