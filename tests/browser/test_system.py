"""The System tab: resource usage of replicas as charts; missing series show a text."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Site, Window, expect_address

pytestmark = pytest.mark.browser

CHARTS = ("gpu", "gpu_memory", "cpu", "memory", "up", "down", "bytes_up", "bytes_down")


def make(site: Site, *, replicas: int, gpu: bool = True, name: str = "Used") -> str:
    return site.python(
        "from tests.browser import seed_usage\n"
        f"run = seed.run(seed.user('olga', 'operator'), name={name!r}, replicas={replicas})\n"
        f"print(seed_usage.used(run, gpu={gpu}).pk)"
    )


def test_curves_of_replicas_and_their_range(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{make(site, replicas=4)}/?tab=system")
    for name in CHARTS:
        plot = page.locator(f'[data-panel="system"] [data-plot="{name}"]')
        expect(plot.locator("[data-legend] button")).to_have_count(6)  # range, mean, four replicas
    memory = page.locator('[data-plot="memory"]')
    expect(memory.locator('[data-id="r0"] output')).to_have_text("2.40 GB")
    expect(page.locator('[data-plot="up"] [data-id="r1"] output')).to_contain_text("MB/s")
    expect(page.locator('[data-plot="gpu"] [data-id="r0"] output')).to_contain_text("%")
    memory.get_by_role("button", name="Table", exact=True).click()
    expect(memory.locator("caption")).to_have_text("Process memory by inner step")
    expect(memory.get_by_role("columnheader", name="Replica 3")).to_be_visible()
    expect_address(page, "tab=system", "table=memory")


def test_missing_series_show_a_text_instead_of_zeros(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{make(site, replicas=2, gpu=False)}/?tab=system")
    for name in ("gpu", "gpu_memory"):
        chart = page.locator(f'[data-plot="{name}"] [data-chart]')
        expect(chart).to_have_attribute("data-empty", "No replica has reported a GPU")
    expect(page.locator('[data-plot="cpu"] [data-legend] button')).to_have_count(4)
    none = site.seed("name='Nothing yet', state='queued', committed=0, replicas=2")
    page.goto(f"/runs/{none}/?tab=system")
    chart = page.locator('[data-plot="memory"] [data-chart]')
    expect(chart).to_have_attribute("data-empty", "Data appears after the first step")
    traffic = page.locator('[data-plot="up"] [data-chart]')
    waiting = "Data appears after the first committed round"
    expect(traffic).to_have_attribute("data-empty", waiting)
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    site.publish(none, run={"state": "running", "tokens": 1000})
    expect(chart).to_have_attribute("data-empty", "No replica has reported this figure")
    expect(traffic).to_have_attribute("data-empty", waiting)
    site.publish(none, run={"committed_rounds": 1})
    expect(traffic).to_have_attribute("data-empty", "No replica has reported this figure")


def test_arrow_keys_read_a_chart_and_toolbars_of_both_tabs_are_linked(
    window: Window, site: Site
) -> None:
    page = window.open(f"/runs/{make(site, replicas=2)}/?tab=system&replicas=0")
    plot = page.locator('[data-plot="cpu"]')
    expect(plot.locator("canvas").first).to_be_visible()
    plot.locator("[data-chart]").press("ArrowRight")
    expect(plot.locator("[data-announce]")).to_contain_text("Replica 0 1.")
    panel = page.locator('[data-panel="system"]')
    panel.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_role("link", name="Overview").click()
    overview = page.locator('[data-panel="overview"]')
    expect(overview.get_by_role("button", name="Tokens", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    overview.get_by_role("button", name="Step", exact=True).click()
    page.get_by_role("link", name="System").click()
    expect(panel.get_by_role("button", name="Tokens", exact=True)).to_have_attribute(
        "aria-pressed", "false"
    )


def test_replica_table_shows_the_newest_figures(window: Window, site: Site) -> None:
    run = make(site, replicas=2)
    page = window.open(f"/runs/{run}/?tab=replicas")
    row = page.locator('[data-replicas="long"] tr[data-key="1"]')
    shown = {name: row.locator(f'[data-c="{name}"]') for name in ("gpu", "gpu_memory", "net")}
    expect(shown["gpu"]).to_have_text("83%")
    expect(shown["gpu_memory"]).to_have_text("55.0 GB")
    expect(shown["net"]).to_have_text("11.6 MB/s ↑  43.0 MB/s ↓")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    rows = site.python(
        "import json\nfrom runs.queries import fleet\nfrom runs.models import Run\n"
        f"print(json.dumps(fleet.replica_rows(Run.objects.get(pk='{run}'))))"
    )
    replicas = json.loads(rows)
    replicas[1] |= {"gpu_busy": 0.31, "gpu_memory_bytes": None, "up_bytes_per_s": None}
    site.publish(run, replicas=replicas)
    expect(shown["gpu"]).to_have_text("31%")
    expect(shown["gpu_memory"]).to_have_text("")
    expect(shown["net"]).to_have_text("43.0 MB/s ↓")


def test_figures_are_in_the_cards_on_narrow_screens(window: Window, site: Site) -> None:
    name = "A run whose name is long " * 3
    page = window.open(f"/runs/{make(site, replicas=5, name=name)}/?tab=replicas", width=360)
    row = page.locator('[data-replicas="long"] tr[data-key="1"]')
    for column in ("gpu", "gpu_memory", "net"):
        expect(row.locator(f'[data-c="{column}"]')).to_be_visible()
    window.fits(page, "replicas-narrow", 360)
    table = row.locator("xpath=ancestor::table")
    assert table.evaluate("t => t.scrollWidth <= t.parentElement.clientWidth")
