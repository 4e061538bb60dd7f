"""Rows of pools in a browser: a row shows what its backend has, and says what an hour costs."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Site, Window

pytestmark = pytest.mark.browser


def row(page: Page, number: int) -> Locator:
    return page.get_by_role("group", name=f"Pool {number}", exact=True)


def add(page: Page, backend: str) -> Locator:
    page.get_by_role("button", name="Add a pool").click()
    made = row(page, page.locator("[data-pool]").count())
    made.get_by_label("Backend").select_option(backend)
    return made


def test_a_row_shows_what_its_backend_has(window: Window) -> None:
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
    assert hardware.input_value().startswith("huggingface:")
    values = hardware.locator("option").evaluate_all("all => all.map((o) => o.value)")
    assert len(values) > 5
    assert all(value.startswith("huggingface:") for value in values)


def test_a_price_is_asked_for_where_the_list_knows_none(window: Window) -> None:
    page = window.open("/runs/new")
    made = add(page, "kubernetes")
    expect(made.get_by_label("Price", exact=True)).to_be_visible()
    expect(made.locator("[data-pool-cost]")).to_have_text("cost unknown")
    expect(page.locator('[data-estimate] [data-e="usd_h"]')).to_have_text("unknown")
    made.get_by_label("Price", exact=True).fill("1.25")
    made.get_by_label("Replicas").fill("3")
    expect(made.locator("[data-pool-cost]")).to_have_text("$3.75/h")
    expect(page.locator('[data-estimate] [data-e="usd_h"]')).to_have_text("$3.75")
    total = page.locator('[data-estimate] [data-e="usd_text"]')
    expect(total).to_contain_text("at most $1.88 in 30m 00s")
    expect(page.locator("[data-replicas-total]")).to_have_text("7 in all")
    made.get_by_label("Backend").select_option("huggingface")
    made.get_by_label("Backend").select_option("local")
    expect(made.get_by_label("Image")).to_be_hidden()


def test_rows_come_and_go_and_keep_their_numbers(window: Window) -> None:
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


def test_an_error_comes_at_the_row_it_is_about(window: Window) -> None:
    page = window.open("/runs/new")
    made = add(page, "kubernetes")
    deadline = made.get_by_label("Deadline of a job")
    deadline.fill("90")
    deadline.blur()
    expect(made.locator(".errors:visible")).to_contain_text("such as 90m or 2h 30m, found '90'")
    expect(deadline).to_have_attribute("aria-invalid", "true")
    expect(row(page, 1).locator(".errors:visible")).to_have_count(0)
    deadline.fill("90m")
    deadline.blur()
    expect(made.locator(".errors:visible")).to_have_count(0)


def test_test_buttons_answer_beside_themselves_and_at_the_fields(window: Window) -> None:
    page = window.open("/runs/new")
    row(page, 1).get_by_role("button", name="Test").click()
    expect(row(page, 1).get_by_role("status")).to_contain_text("Works")
    place = page.get_by_role("region", name="Rendezvous")
    place.get_by_role("button", name="Test").click()
    expect(place.get_by_role("status")).to_contain_text("Works: wrote, read, listed")
    place.get_by_label("Rendezvous", exact=True).fill("moon://crater/1")
    expect(place.get_by_role("status")).to_have_text("")
    place.get_by_role("button", name="Test").click()
    expect(place.get_by_role("status")).to_contain_text("See below")
    expect(page.locator("#id_rendezvous_error")).to_contain_text("found 'moon://crater/1'")
    place.get_by_label("Rendezvous", exact=True).fill("")
    expect(page.locator("#id_rendezvous_error")).to_be_hidden()


def test_a_folder_with_a_remote_pool_is_refused_before_anything_is_launched(
    window: Window, site: Site
) -> None:
    page = window.open("/runs/new")
    page.get_by_label("Name").fill("Never launched")
    add(page, "kubernetes")
    page.get_by_role("button", name="Launch").click()
    summary = page.locator("[data-summary]")
    expect(summary).to_contain_text("expected a bucket that replicas on kubernetes can reach")
    expect(row(page, 2).get_by_label("Backend")).to_have_value("kubernetes")
    expect(page.get_by_label("Name")).to_have_value("Never launched")
    # The estimate has been asked by now, and knows nothing of what only the launch asks.
    expect(row(page, 2).locator("[data-pool-cost]")).to_have_text("cost unknown")
    error = page.locator("#id_rendezvous_error")
    expect(error).to_contain_text("expected a bucket that replicas on kubernetes can reach")
    window.shoot(page, "submit-pools-errors")
    count = "from runs.models import Run; print(Run.objects.filter(name='Never launched').count())"
    assert site.python(count) == "0"
    page.get_by_role("button", name="Remove pool 2").click()
    expect(error).to_be_hidden()
    window.errors[:] = [e for e in window.errors if "422" not in e]


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (360, "light")])
def test_many_pools_fit(window: Window, width: int, scheme: str) -> None:
    page = window.open("/runs/new", width=width, scheme=scheme)
    for backend in ("kubernetes", "sagemaker", "huggingface", "modal"):
        add(page, backend)
    page.wait_for_timeout(300)
    window.shoot(page, f"page-new-pools-{width}-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    nameless = re.findall(
        r"^\s*- (?:button|link|textbox|combobox|spinbutton|checkbox)(?: \[[^\]]*\])*:?$",
        page.locator("body").aria_snapshot(),
        re.M,
    )
    assert nameless == []
