"""The comparison of runs."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import BLANK, CUT_TEXTS, Site, Window, expect_address

pytestmark = pytest.mark.browser

OLGA = (
    "from tests.browser.seed_prices import priced, unpriced\nolga = seed.user('olga', 'operator')\n"
)
LONG = "H 80 with a very long name that the table truncates"


@pytest.fixture(scope="module")
def three(site: Site) -> str:
    return site.python(
        OLGA + "print(','.join(str(r.pk) for r in ("
        "priced(seed.run(olga, name='H 40, as last week', state='succeeded', committed=20), 3.9),"
        f"priced(seed.run(olga, name={LONG!r}, state='succeeded', committed=14, sync_every=80,"
        "seed=2), 2.5),"
        "unpriced(seed.run(olga, name='Local', replicas=2, committed=9, seed=3)))))"
    )


@pytest.fixture(scope="module")
def twenty(site: Site) -> str:
    return site.python(
        OLGA + "print(','.join(str(seed.run(olga, name=f'sweep {n:02d}', replicas=1 + n % 3,"
        "committed=4 + n, sync_every=20 + 10 * (n % 4)).pk) for n in range(20)))"
    )


def colours(page: Page, selector: str) -> list[str]:
    """Colours and dashes of line samples."""
    found: list[str] = page.locator(selector).evaluate_all(
        "(lines) => lines.map((line) => line.style.stroke + line.getAttribute('stroke-dasharray'))"
    )
    return found


def test_twenty_runs_no_run_and_one_run(window: Window, twenty: str) -> None:
    page = window.open(f"/compare?ids={twenty}")
    expect(page.locator("[data-chart] canvas")).to_be_visible()
    expect(page.locator("[data-legend] button")).to_have_count(20)
    looks = colours(page, ".compare:not(.diff) .swatch path")
    assert len(set(looks)) == 20
    window.shoot(page, "compare-twenty")
    page.goto("/compare")
    window.shoot(page, "compare-none")
    page.goto(f"/compare?ids={twenty.split(',')[0]}")
    expect(page.locator("[data-chart] canvas")).to_be_visible()
    window.shoot(page, "compare-one")


def test_address_keeps_axis_series_and_baseline(window: Window, three: str) -> None:
    # A run has the same colour in the list, in any order of the comparison, and in its chart.
    page = window.open(f"/?q=id:{three}&sel={three},zz,yy")  # words that are no ids
    expect(page.locator(".runs .swatch")).to_have_count(3)
    rows = page.locator("[data-run]").evaluate_all("(rows) => rows.map((row) => row.dataset.run)")
    listed = dict(zip(rows, colours(page, ".runs .swatch path"), strict=True))
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("[data-chart] canvas")).to_be_visible()
    compared = colours(page, ".compare:not(.diff) .swatch path")
    assert compared == [listed[run] for run in three.split(",")]
    assert colours(page, ".legend .swatch path") == compared
    page.get_by_role("button", name="Cost").click()
    expect(page.get_by_text("Not shown: Local (unknown price)")).to_be_visible()
    expect(page.locator("[data-legend] button")).to_have_count(2)
    page.get_by_label("Metric").select_option("Training loss")
    expect_address(page, "x=money", "series=loss")
    window.shoot(page, "compare-money", full=False)
    page.get_by_role("link", name="Make Local the baseline").click()
    expect(page.get_by_text("Differences from the baseline, Local")).to_be_visible()
    expect(page.locator(".compare:not(.diff) .swatch path")).to_have_count(3)
    assert colours(page, ".compare:not(.diff) .swatch path") == compared[2:] + compared[:2]
    expect_address(page, "x=money")
    page.get_by_role("button", name="Wall time").click()
    # Any metric of a board, smoothed, on a logarithmic scale.
    page.get_by_label("Metric").select_option("Goodput")
    page.get_by_role("button", name="Logarithmic scale").click()
    page.get_by_label("Smoothing").fill("0.5")
    expect_address(page, "series=goodput", "smooth=0.5", "log=y")
    expect(page.locator("[data-legend] button")).to_have_count(3)
    window.shoot(page, "compare-goodput", full=False)
    page.get_by_role("button", name="Table", exact=True).click()
    value = page.locator("[data-chart-table] td", has_text="%").first
    expect(value).to_be_visible()
    page.reload()
    expect(
        page.locator("[data-chart-table] th", has_text="time since the first step")
    ).to_be_visible()
    expect(value).to_be_visible()
    expect(page.get_by_label("Metric")).to_have_value("goodput")
    expect(page.get_by_label("Smoothing")).to_have_value("0.5")
    expect(page.get_by_role("button", name="Logarithmic scale")).to_have_attribute(
        "aria-pressed", "true"
    )
    page.get_by_role("link", name="Save as board").click()
    expect(page.get_by_label("Metric of panel 1")).to_have_value("goodput")
    expect(page.get_by_label("Smoothing of panel 1")).to_have_value("0.5")
    expect(page.get_by_label("Scale of panel 1")).to_have_value("log")


def test_arrow_keys_read_the_chart_and_late_failures_leave_it(window: Window, three: str) -> None:
    page = window.open(BLANK, width=1280)
    page.add_init_script(CUT_TEXTS)
    page.goto(f"/compare?ids={three}")
    expect(page.locator("[data-chart] canvas")).to_be_visible()
    page.locator("[data-chart]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("[data-announce]")).to_contain_text("0: H 40, as last week 6.095")
    # The axis ends with a label, 2m 30s.
    wall = page.get_by_role("button", name="Wall time")
    wall.click()
    expect(wall).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("cut") == []
    # A request that fails after another metric was chosen does not clear the chart of that one.
    held: list[Route] = []
    page.route("**/compare.json*series=loss", lambda route: held.append(route))
    page.get_by_label("Metric").select_option("Training loss")
    with page.expect_response("**/compare.json*series=goodput"):
        page.get_by_label("Metric").select_option("Goodput")
    with page.expect_event("requestfailed"):
        held[0].abort()
    page.evaluate("() => fetch(location.href).then(() => null)")  # the failure was handled
    expect(page.locator("[data-legend] button")).to_have_count(3)
    window.errors[:] = [error for error in window.errors if "ERR_FAILED" not in error]


def test_results_and_curves_follow_the_stream(window: Window, site: Site) -> None:
    run = site.seed("name='Watched', committed=3")
    page = window.open(f"/compare?ids={run}")
    row = page.get_by_role("row").filter(has_text="Watched")
    expect(page.locator("[data-conn][data-state=live]")).to_be_visible()
    expect(page.locator("[data-chart] canvas")).to_be_visible()
    site.python(
        f"from runs.models import Run\nRun.objects.filter(pk={run!r}).update(eval_loss=1.2345)"
    )
    with page.expect_response("**/compare.json*"):
        site.publish(run, run={"id": run})
    expect(row.first).to_contain_text("1.234")
    expect(row.first.locator("svg").first).to_be_attached()
