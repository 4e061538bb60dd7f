"""The list of runs: columns, differing settings, saved views, deletion, banners, shortcuts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Site, Window, expect_address, overflow

pytestmark = pytest.mark.browser

CLEAR = """
from runs.models import Run, SavedView
from django.utils import timezone
Run.objects.update(archived_at=timezone.now())
SavedView.objects.all().delete()
"""
BEAT = "from runs.backends import health\nfrom runs import live_stream as live\n"
THREE = """
from runs.models import Run
olga, oscar = seed.user('olga', 'operator'), seed.user('oscar', 'operator')
runs = [
    seed.run(olga, name='H40', state='succeeded', committed=20, age_s=900),
    seed.run(olga, name='H80', state='failed', committed=9, age_s=700, sync_every=80),
    seed.run(oscar, name='Owned by oscar', state='failed', committed=4, age_s=500),
]
print(' '.join(str(r.pk) for r in runs))
"""
MANY = """
from datetime import timedelta
from runs.models import Run
olga = seed.user('olga', 'operator')
long = 'llama-1b-c4-H40-outer-lr-0.7-momentum-0.9-eight-replicas-on-three-clouds-again-2'
first = seed.run(olga, name=long, committed=100, total_rounds=400, sync_every=10, replicas=24)
Run.objects.filter(pk=first.pk).update(
    tags=['sweep', 'a-tag-that-is-as-long-as-a-tag-may-ever-get', 'baseline', 'x' * 40])
for n in range(54):
    Run.objects.create(
        name=f'{long[:60]}-{n}' if n % 3 else f'r{n}', owner=olga, state='succeeded',
        state_since=first.created_at, created_at=first.created_at - timedelta(hours=n + 1),
        started_at=first.created_at - timedelta(hours=n + 1), ended_at=first.created_at,
        rendezvous=f's3://b/{n}', submit_key=f'many{n}{timezone.now().timestamp()}',
        group_settings=seed.group_settings(), workload={}, eval_loss=1.5 + n / 100,
        tokens=n * 10**9,
    )
print(first.pk)
"""


@pytest.fixture
def empty(site: Site) -> Iterator[None]:
    site.python(CLEAR)
    yield
    site.python(CLEAR)


@pytest.fixture
def runs(site: Site, empty: None) -> list[str]:
    return site.python(THREE).split()


def open_menu(page: Page, name: str) -> None:
    page.locator(".find summary", has_text=name).click()


def head(page: Page, name: str) -> Locator:
    return page.get_by_role("columnheader", name=name, exact=True)


@pytest.mark.slow
def test_layout(window: Window, site: Site, empty: None) -> None:
    page = window.open("/", width=360)
    for count in ("0", "1", "many"):
        if count == "1":
            site.python(
                THREE + "Run.objects.exclude(name='H40').update(archived_at=runs[0].created_at)"
            )
        elif count == "many":
            site.python("from django.utils import timezone\n" + MANY)
        page.goto("/")
        window.fits(page, f"list-{count}", 360, 1280, 360, full=count != "many")
    for name in ("Columns", "Views"):
        open_menu(page, name)
        window.fits(page, f"list-{name.lower()}", 360, 1280, 360, full=False)
    page.goto("/?columns=name,state,loss,age&differ=1")
    window.fits(page, "list-differ", 360, 1280, 360, full=False)


def test_selected_columns_stay_in_the_address(window: Window, runs: list[str]) -> None:
    page = window.open(f"/?sort=-name&sel={runs[0]}")
    open_menu(page, "Columns")
    for name in ("Replicas", "Goodput", "Started", "Tags"):
        page.locator(".pick").get_by_label(name, exact=True).uncheck()
    page.locator(".pick").get_by_label("Age", exact=True).check()
    page.get_by_role("button", name="Show", exact=True).click()
    expect(head(page, "Age")).to_be_visible()
    expect_address(page, "sort=-name")
    expect(page.get_by_text("1 selected")).to_be_visible()
    for name in ("Replicas", "Goodput", "Started"):
        expect(head(page, name)).to_have_count(0)
    heads = page.locator("thead th").all_text_contents()
    page.get_by_role("link", name="Tokens", exact=True).click()
    expect(page.locator("th[aria-sort]")).to_have_text("Tokens")
    expect(page.locator("thead th")).to_have_text(heads)
    open_menu(page, "Columns")
    page.get_by_role("link", name="Reset").click()
    expect(head(page, "Goodput")).to_be_visible()
    narrow = window.open("/?columns=name,loss", width=360)
    expect(narrow.locator("[data-run]").first).to_be_visible()
    labels = narrow.locator("[data-run]").first.locator("[data-label]")
    expect(labels).to_have_count(1)
    expect(labels).to_have_attribute("data-label", "Eval loss")


def test_differing_settings_are_columns(window: Window, runs: list[str]) -> None:
    page = window.open("/?sort=name")
    open_menu(page, "Columns")
    page.get_by_role("switch", name="Show differing settings").check()
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator("th.c-differ")).to_have_count(1)
    expect(page.locator("td.c-differ")).to_have_text(["40", "80", "40"])
    page.goto("/?q=H40&differ=1")
    expect(page.get_by_text("There is only one run to compare")).to_be_visible()


def test_view_is_saved_shared_changed_and_deleted(window: Window, runs: list[str]) -> None:
    page = window.open("/?q=state:failed&sort=name&columns=name,loss")
    open_menu(page, "Views")
    page.get_by_label("Save current list as").fill("Failures")
    page.get_by_label("Shared with all users").check()
    page.get_by_role("button", name="Save view").click()
    expect(page.get_by_text("View Failures saved")).to_be_visible()
    expect_address(page, "columns=name")

    other = window.open("/", user="vera")
    open_menu(other, "Views")
    other.locator(".views").get_by_role("link", name="Failures").click()
    expect(other.locator("[data-run]")).to_have_count(2)
    expect(other.locator("thead th")).to_have_text(["", "Run", "Eval loss"])
    open_menu(other, "Views")
    expect(other.locator(".views").get_by_text("Change")).to_have_count(0)
    expect(other.get_by_label("Shared with all users")).to_have_count(0)

    page.goto("/?q=is:ended")
    open_menu(page, "Views")
    page.get_by_label("Change Failures").click()
    window.shoot(page, "list-view-change", full=False)
    page.get_by_role("button", name="Update to current list").click()
    expect(page.get_by_text("View Failures changed")).to_be_visible()
    open_menu(page, "Views")
    expect(page.locator(".views a[aria-current]")).to_have_text("Failures")
    page.get_by_label("Change Failures").click()
    page.get_by_label("Name", exact=True).fill("All ended")
    page.get_by_role("button", name="Save changes").click()
    open_menu(page, "Views")
    page.get_by_label("Change All ended").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("View All ended deleted")).to_be_visible()


def test_bulk_deletion_requires_the_number(window: Window, runs: list[str]) -> None:
    page = window.open("/?sort=name")
    page.get_by_label("Select all on this page").check()
    page.locator("[data-bulk]").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Delete 2 runs?")
    kept = page.locator("li", has_text="Owned by oscar")
    expect(kept).to_contain_text("Operators can change only their own runs")
    page.get_by_label("Type the number").fill("3")
    page.get_by_role("button", name="Delete 2 runs").click()
    expect(page.get_by_role("alert")).to_contain_text("Enter 2")
    for width, scheme in ((1280, "light"), (360, "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        window.shoot(page, f"list-delete-{width}-{scheme}")
        assert overflow(page) <= 0
    page.get_by_label("Type the number").fill("2")
    page.get_by_role("button", name="Delete 2 runs").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("2 runs being deleted")
    page.get_by_role("link", name="Back to the list").click()
    expect(page.get_by_text("being deleted")).to_have_count(2)
    window.errors[:] = [e for e in window.errors if "422" not in e]


def test_banner_without_a_worker(window: Window, site: Site, runs: list[str]) -> None:
    message = "No worker is running."
    run = site.seed("name='Alone', committed=3")
    site.python(BEAT + "live.client().set(health.HEARTBEAT, 1)")
    try:
        page = window.open("/")
        of_run = window.open(f"/runs/{run}/")
        form = window.open("/runs/new")
        for one in (page, of_run, form):
            expect(one.get_by_text(message)).to_be_visible()
        for one in (page, of_run):
            expect(one.locator("[data-conn]")).to_have_text("No worker")
            expect(one.locator("[data-conn]")).to_have_attribute("data-state", "silent")
        window.shoot(page, "list-silent", full=False)
        site.python(BEAT + "health.beat()")
        for one in (page, of_run):  # the stream reports it
            expect(one.get_by_text(message)).to_be_hidden()
            expect(one.locator("[data-conn]")).to_have_attribute("data-state", "live")
        site.python(BEAT + "live.client().set(health.HEARTBEAT, 1)")
        for one in (page, of_run):
            expect(one.get_by_text(message)).to_be_visible()
            expect(one.locator("[data-conn]")).to_have_text("No worker")
    finally:
        site.python(BEAT + "health.beat()")


def test_silent_run_is_marked(window: Window, site: Site, empty: None) -> None:
    run = site.seed("name='Silent run', committed=3")
    site.python(
        "from runs.backends import health\nfrom datetime import timedelta\n"
        "from django.utils import timezone\nfrom runs.models import Run\n"
        "Run.objects.filter(name='Silent run').update("
        "last_seen_at=timezone.now() - timedelta(seconds=health.STALE_RUN_S + 60))"
    )
    page = window.open("/")
    expect(page.locator("[data-banner=stale]")).to_be_visible()
    expect(page.locator("[data-run]").locator("[data-f=silent]")).to_be_visible()
    window.shoot(page, "list-stale", full=False)
    of_run = window.open(f"/runs/{run}/")
    expect(of_run.locator("[data-banner=stale]")).to_be_visible()
    window.shoot(of_run, "run-stale", full=False)


def test_a_run_that_falls_silent_loses_its_speed(window: Window, site: Site, empty: None) -> None:
    site.seed("name='Falls silent', committed=3")
    page = window.open("/?columns=state,name,speed")
    speed = page.locator("[data-run] [data-f=tokens_per_s]")
    expect(speed).to_have_text("22.4k")
    expect(page.locator("[data-conn]")).to_have_text("Live")
    page.locator("[data-banner=stale]").evaluate("banner => { banner.dataset.after = -1; }")
    expect(speed).to_have_text("–")
    expect(page.locator("[data-run] [data-f=silent]")).to_be_visible()


def test_keyboard_shortcuts(window: Window, runs: list[str]) -> None:
    page = window.open("/")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(dialog).to_be_visible()
    for width, scheme in ((1280, "light"), (360, "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        window.shoot(page, f"keys-{width}-{scheme}", full=False)
    page.set_viewport_size({"width": 1280, "height": 800})
    page.keyboard.press("j")  # disabled while a dialog is open
    expect(page.locator("[data-run]:focus-within")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.keyboard.press("/")
    page.keyboard.type("a?j/")
    expect(page.get_by_label("Find runs")).to_have_value("a?j/")
    expect(dialog).to_be_hidden()
    page.goto(f"/runs/{runs[0]}/")
    page.keyboard.press("]")
    expect(page.locator(".tabs a[aria-current]")).to_have_text("Rounds")
    page.keyboard.press("[")
    page.keyboard.press("[")
    expect(page.locator(".tabs a[aria-current]")).to_contain_text("Activity")
    page.goto("/planner")
    page.keyboard.press("/")
    expect(page.get_by_label("Find runs")).to_be_focused()
    page.get_by_text("olga").first.click()
    page.get_by_role("button", name="Shortcuts").click()
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
