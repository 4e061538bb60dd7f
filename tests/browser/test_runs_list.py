"""The list of runs: query, filters, selection, shortcuts, and new runs."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import (
    BLANK,
    Site,
    Window,
    eventually,
    expect_address,
    overflow,
    tab_to,
)

pytestmark = pytest.mark.browser

MAKE = """
from runs.models import Run
from tests.browser.seed_prices import priced
olga, oscar = seed.user('olga', 'operator'), seed.user('oscar', 'operator')
long = 'A run with a very long name that shows how the page wraps and truncates it'
runs = [
    priced(seed.run(olga, name='Baseline', state='succeeded', committed=20, age_s=900), 2.0),
    seed.run(oscar, name='From a colleague', committed=9, age_s=700),
    priced(seed.run(olga, name='Hot', state='degraded', committed=14, age_s=500,
                    reason='live 3 < target 4'), 4.0, backend='modal'),
    seed.run(olga, name='Bad bucket', state='failed', committed=0, age_s=400),
    seed.run(olga, name=long, committed=100, total_rounds=400, sync_every=10, replicas=24, age_s=9),
]
Run.objects.filter(pk=runs[0].pk).update(tags=['sweep', 'H40'])
Run.objects.filter(pk=runs[2].pk).update(tags=['sweep'])
print(' '.join(str(r.pk) for r in runs))
"""


@pytest.fixture(scope="module")
def runs(site: Site) -> Iterator[list[str]]:
    # Archive the runs of other tests: the list shows only those below.
    archive_all = "from runs.models import Run\nfrom django.utils import timezone\n"
    archive_all += "Run.objects.update(archived_at=timezone.now())\n"
    site.python(archive_all)
    yield site.python(MAKE).split()
    site.python(archive_all)


def test_layout(window: Window, runs: list[str]) -> None:
    page = window.open(f"/?sel={runs[0]},{runs[2]}", width=360)
    expect(page.get_by_text("2 selected")).to_be_visible()
    window.fits(page, "runs", 360, 800, 1440)
    page.get_by_text("Filters", exact=True).click()
    expect(page.locator(".facet").first).to_be_visible()
    window.fits(page, "runs-filters", 360, 800, 1440, full=False)


def test_filters_that_open_before_the_script_runs_are_loaded(
    window: Window, runs: list[str]
) -> None:
    page = window.open(BLANK)
    held: list[Route] = []
    page.route(re.compile(r"/runs\.[\w.]*js"), lambda route: held.append(route))
    page.goto("/", wait_until="commit")
    page.get_by_text("Filters", exact=True).click()
    eventually(page, lambda: held, bool)
    for route in held:
        route.continue_()
    expect(page.locator(".facet a", has_text="oscar")).to_be_visible()


def test_typed_query_and_filters(window: Window, runs: list[str]) -> None:
    page = window.open("/")
    page.keyboard.press("/")
    page.keyboard.type("backend:local loss<3")
    page.keyboard.press("Enter")
    expect(page.locator("[data-run]")).to_have_count(2)
    page.get_by_text("Filters", exact=True).click()
    page.locator(".facet a", has_text="oscar").click()
    expect(page.locator("[data-run]")).to_have_count(1)
    expect_address(page, "owner%3Aoscar")
    page.get_by_role("link", name="Remove loss<3").click()
    expect(page.get_by_label("Find runs")).to_have_value("backend:local owner:oscar")
    page.get_by_label("Find runs").fill("los<3")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("los<3: expected one of state")
    window.shoot(page, "runs-bad-query")
    page.get_by_label("Find runs").fill("nothing-like-it")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="No run matches")).to_be_visible()
    window.shoot(page, "runs-no-match")
    window.errors[:] = [e for e in window.errors if "422" not in e]


def test_completion_by_keyboard_and_groups(window: Window, runs: list[str]) -> None:
    page = window.open("/", width=360)
    field = page.get_by_label("Find runs")
    field.press_sequentially("ow")
    found = page.get_by_role("listbox", name="Completions").get_by_role("option")
    expect(found).to_have_text(["owner:user name"])
    window.shoot(page, "runs-completion-360", full=False)
    field.press("ArrowDown")
    field.press("Tab")
    expect(found.first).to_contain_text("olga")
    field.press("ArrowDown")
    field.press("Enter")
    expect(field).to_have_value("owner:olga ")
    field.press("Escape")
    expect(page.get_by_role("listbox", name="Completions")).to_be_hidden()
    field.press("Enter")
    expect(page.locator("[data-run]")).to_have_count(4)
    page.get_by_text("Group", exact=True).click()
    page.get_by_role("link", name="Tag", exact=True).click()
    table = page.get_by_role("table", name="Runs by tag, the most expensive first")
    expect(table.locator("tbody tr")).to_have_count(3)
    window.shoot(page, "runs-groups-360")
    assert overflow(page) <= 0
    table.get_by_role("link", name="sweep").click()
    expect(page.locator("[data-run]")).to_have_count(2)


def test_a_completion_replaces_what_was_typed_since_it_was_listed(
    window: Window, runs: list[str]
) -> None:
    page = window.open("/")
    field = page.get_by_label("Find runs")
    field.press_sequentially("o")
    found = page.get_by_role("listbox", name="Completions").get_by_role("option")
    expect(found.filter(has_text="owner:")).to_have_count(1)
    page.route("**/complete.json*", lambda route: None)  # no further answer
    field.press("w")
    field.press("ArrowDown")
    field.press("Tab")
    expect(field).to_have_value("owner:")


@pytest.mark.slow
def test_runs_are_compared_by_keyboard_alone(window: Window, runs: list[str]) -> None:
    page = window.open("/?sort=name")
    for key in "jxjx":
        page.keyboard.press(key)
    expect(page.get_by_text("2 selected")).to_be_visible()
    expect_address(page, "sel=")
    page.reload()
    expect(page.get_by_text("2 selected")).to_be_visible()
    tab_to(page, page.get_by_role("link", name="Tokens", exact=True))
    page.keyboard.press("Enter")
    expect(page.locator("th[aria-sort]")).to_have_text("Tokens")
    expect(page.get_by_text("2 selected")).to_be_visible()
    tab_to(page, page.get_by_role("button", name="Compare"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare 2 runs")
    tab_to(page, page.get_by_role("link", name="Change selection"))
    page.keyboard.press("Enter")
    expect(page.get_by_text("2 selected")).to_be_visible()
    tab_to(page, page.get_by_role("button", name="Clear"))
    page.keyboard.press("Space")
    expect(page.locator("[data-bulk]")).to_be_hidden()
    expect(page).not_to_have_url(re.compile("sel="))


def test_runs_are_stopped_by_keyboard_alone(window: Window, runs: list[str]) -> None:
    page = window.open("/?q=state:active&sort=name")
    tab_to(page, page.get_by_label("Select all on this page"))
    page.keyboard.press("Space")
    expect(page.get_by_text("3 selected")).to_be_visible()
    tab_to(page, page.get_by_role("button", name="Stop"), key="Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Stop 2 runs?")
    expect(page.get_by_text("1 belongs to other users")).to_be_visible()
    window.shoot(page, "runs-stop")
    tab_to(page, page.get_by_role("button", name="Stop 2 runs"))
    page.keyboard.press("Enter")
    expect(page.get_by_text("2 stopping")).to_be_visible()
    expect_address(page, "q=state%3Aactive")


def test_new_runs_are_counted_by_the_query(window: Window, site: Site, runs: list[str]) -> None:
    page = window.open("/?q=name:fresh,Baseline")
    expect(page.locator("[data-conn]")).to_have_text("Live")

    def submit(name: str) -> None:
        run = site.python(
            "from runs.models import Run\nfrom django.utils import timezone\n"
            f"run = seed.run(seed.user('olga', 'operator'), name={name!r}, committed=0)\n"
            "Run.objects.filter(pk=run.pk).update(created_at=timezone.now())\nprint(run.pk)"
        )
        at = datetime.datetime.now(datetime.UTC).isoformat()
        site.publish(run, run={"id": run, "created_at": at, "state": "queued"})

    submit("another")
    submit("fresh one")
    expect(page.get_by_role("button", name="1 new")).to_be_visible()
    expect(page.locator("[data-run]")).to_have_count(1)
    window.shoot(page, "runs-new", full=False)
    page.get_by_role("button", name="1 new").click()
    expect(page.locator("[data-run]")).to_have_count(2)
