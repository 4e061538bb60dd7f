"""Jobs that people come to the submit form for, with the clicks that each takes."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import Site, Window, overflow
from tests.browser.submit_page import open_section

pytestmark = pytest.mark.browser


class Clicks:
    """Clicks and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, target: Locator) -> None:
        target.click()
        self.count += 1


def test_again_with_another_learning_rate_takes_three_clicks(window: Window, site: Site) -> None:
    run = site.seed("name='To repeat', replicas=1")
    site.python(
        "from django.conf import settings\nfrom runs.models import Run\n"
        f"Run.objects.filter(pk={run!r})"
        f".update(rendezvous=settings.DEFAULT_RENDEZVOUS.rstrip('/') + '/{run}')"
    )
    click = Clicks()
    page = window.open(f"/runs/{run}/")
    click(page.get_by_text("More", exact=True).first)
    click(page.get_by_role("link", name="Clone"))
    expect(page.get_by_role("heading", level=1)).to_have_text("Clone of To repeat")
    search = page.get_by_label("Search settings")
    expect(search).to_be_focused()
    expect(page.get_by_text("Nothing changed yet")).to_be_visible()
    expect(page.get_by_label("Data shards")).to_be_hidden()
    for width in (390, 1280, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        window.shoot(page, f"clone-{width}", full=False)
        assert overflow(page) <= 0
    page.keyboard.type("inner learning")
    rate = page.get_by_label("Inner learning rate")
    expect(rate).to_be_visible()
    expect(page.get_by_label("Batch size")).to_be_hidden()
    page.keyboard.press("Enter")
    expect(rate).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("0.00123")
    changes = page.locator("[data-changes]")
    expect(changes.get_by_role("row", name="Inner learning rate")).to_contain_text("0.00123")
    expect(changes.get_by_role("row")).to_have_count(2)  # with the heads
    window.shoot(page, "clone-changed", full=False)
    command = page.locator("[data-command]")
    expect(command).to_contain_text(f"archipelago clone {run}")
    expect(command).to_contain_text("settings.inner_lr=0.00123")
    click(page.get_by_role("button", name="Launch", exact=True))
    expect(page.get_by_role("heading", level=1)).to_contain_text("To repeat (copy)")
    assert click.count == 3
    settings = site.python(
        "from runs.models import Run; "
        "print(Run.objects.get(name='To repeat (copy)').group_settings['inner_lr'])"
    )
    assert settings.strip() == "0.00123"


def test_a_pasted_document_fills_the_form_with_errors_at_their_fields(window: Window) -> None:
    page = window.open("/runs/new")
    open_section(page, "Source")
    page.get_by_label("Document", exact=True).fill(
        "name: From YAML\nsettings:\n  sync_every: 0\n  nothing: 1\npools:\n  - count: 2\n"
    )
    page.get_by_role("button", name="Use the document").click()
    expect(page.get_by_label("Name", exact=True)).to_have_value("From YAML")
    expect(page.locator("#id_sync_every_error")).to_contain_text("expected 1 or more, found 0")
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
    expect(page.locator("#id_sweep_error")).to_contain_text("expected a group setting")
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
    site.python(
        "from runs.models import Run\n"
        "for index, loss in enumerate((3.5, 2.25, 2.75)):\n"
        "    Run.objects.filter(sweep__name='Rates', sweep_index=index).update(eval_loss=loss)"
    )
    page.reload()
    expect(rows.first).to_contain_text("2.25")
    expect(rows.first).to_contain_text("0.001")
    expect(page.locator(".scatter circle")).to_have_count(3)
    address = page.url
    for width, scheme in ((1440, "light"), (390, "dark")):
        shot = window.open(address, width=width, scheme=scheme)
        window.shoot(shot, f"sweep-{width}-{scheme}")
        assert overflow(shot) <= 0
    page.locator("summary", has_text="Stop all").click()
    page.get_by_role("button", name="Stop 3 runs").click()
    expect(page.get_by_text("Rates: stopping 3 runs.")).to_be_visible()
