"""Common jobs on the pages, with the number of clicks that each takes."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import Site, Window, overflow

pytestmark = [pytest.mark.browser, pytest.mark.slow]

MAKE = """
from django.conf import settings
from django.utils import timezone
from runs.actions import boards
from runs.models import Run
from tests.browser import seed_spend
from tests.browser.seed_prices import priced
from tests.browser.test_failure_card import FAIL
Run.objects.update(archived_at=timezone.now())
olga = seed.user('olga', 'operator')
runs = [
    seed.run(olga, name='Fails', committed=6, age_s=60),
    priced(seed.run(olga, name='Hot', replicas=4, committed=3, age_s=50), 4.0),
    priced(seed.run(olga, name='Hotter', replicas=8, committed=3, age_s=40), 2.0),
    seed.run(olga, name='Cheap', replicas=2, committed=4, age_s=30),
    seed.run(olga, name='To repeat', replicas=1, committed=5, age_s=20),
]
for run in runs:
    folder = settings.DEFAULT_RENDEZVOUS.rstrip('/')
    Run.objects.filter(pk=run.pk).update(rendezvous=f'{folder}/{run.pk}')
exec(FAIL.format(run=str(runs[0].pk)))
seed_spend.history(runs[3], days=3, price=1.5, backend='modal', tags=['paper'])
boards.save(olga, name='Three at once', runs=[str(run.pk) for run in runs[1:4]])
print(*(run.pk for run in runs))
"""


class Clicks:
    """Clicks and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, target: Locator, **options: object) -> None:
        target.click(**options)  # type: ignore[arg-type]
        self.count += 1


@pytest.fixture
def click() -> Clicks:
    return Clicks()


@pytest.fixture(scope="module")
def runs(site: Site) -> list[str]:
    """Names: Fails, Hot, Hotter, Cheap, To repeat. Runs of other tests are archived."""
    return site.python(MAKE).split()


def test_why_a_replica_died_takes_one_click(window: Window, runs: list[str], click: Clicks) -> None:
    page = window.open("/?sort=name")
    row = page.locator(f'[data-run="{runs[0]}"]')
    expect(row.locator(".why")).to_contain_text("replica 1: out of memory, exit code 137")
    click(row.get_by_role("link", name="Fails"))
    card = page.get_by_role("region", name="Replica 1 failed: out of memory")
    expect(card).to_be_in_viewport()
    expect(card).to_contain_text("OOMKilled")
    assert click.count == 1


def test_compare_the_last_five_runs_takes_three_clicks(
    window: Window, runs: list[str], click: Clicks
) -> None:
    page = window.open("/")
    picks = page.locator("[data-pick]")
    expect(picks).to_have_count(5)
    click(picks.first)
    click(picks.nth(4), modifiers=["Shift"])
    expect(page.get_by_text("5 selected")).to_be_visible()
    click(page.get_by_role("button", name="Compare"))
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare 5 runs")
    expect(page.locator("[data-chart] canvas")).to_be_visible()
    expect(page.locator("[data-legend] button")).to_have_count(5)
    assert click.count == 3


def test_what_was_spent_this_week_takes_one_click(
    window: Window, runs: list[str], click: Clicks
) -> None:
    page = window.open("/", user="vera")
    click(page.get_by_role("link", name="Spend", exact=True))
    for kind, name in (("backend", "Modal"), ("owner", "olga")):
        table = page.get_by_role("table", name=f"Spending by {kind}", exact=True)
        expect(table.get_by_role("link", name=name, exact=True)).to_be_visible()
    assert click.count == 1


def test_every_job_with_its_machine_and_price_takes_one_click(
    window: Window, runs: list[str], click: Clicks
) -> None:
    page = window.open("/", user="vera")
    click(page.get_by_role("link", name="Fleet", exact=True))
    job = page.get_by_role("row").filter(has=page.get_by_role("link", name="Cheap")).first
    expect(job).to_contain_text("H100")
    expect(job).to_contain_text("$1.50")
    assert click.count == 1


def test_three_runs_at_once_take_two_clicks_and_follow_them(
    window: Window, site: Site, runs: list[str], click: Clicks
) -> None:
    page = window.open("/", width=390)
    page.set_viewport_size({"width": 1440, "height": 900})
    click(page.get_by_role("link", name="Boards", exact=True))
    click(page.get_by_role("link", name="Three at once"))
    expect(page.locator("[data-chart] canvas")).to_have_count(2)
    expect(page.locator("[data-legend] button")).to_have_count(6)
    assert click.count == 2
    window.fits(page, "board", 390, 1280, 1440)
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    results = page.get_by_role("table", name="Results of each run")
    expect(results).not_to_contain_text("9.99M")
    header = site.python(
        "import json\nfrom runs.models import Run\nfrom runs.queries import selectors\n"
        f"run = Run.objects.filter(pk={runs[1]!r})\nrun.update(tokens=9_990_000)\n"
        "print(json.dumps(selectors.run_header(run.get())))"
    )
    site.publish(runs[1], run=json.loads(header))
    expect(results).to_contain_text("9.99M")
    page.get_by_role("link", name="Edit").click()
    expect(page.get_by_label("Metric of panel 2")).to_have_value("loss")
    window.fits(page, "board-edit", 390, 1440)


def test_a_log_of_what_is_filtered_takes_two_clicks(
    window: Window, runs: list[str], click: Clicks
) -> None:
    page = window.open(f"/runs/{runs[3]}/")
    click(page.get_by_role("link", name="Logs", exact=True))
    page.get_by_role("region", name="Logs").get_by_label("Level").select_option("warning")
    link = page.get_by_role("link", name="Download .txt")
    expect(link).to_have_attribute("href", re.compile("level=warning"))
    with page.expect_download() as download:
        click(link)
    lines = download.value.path().read_text().splitlines()
    assert 0 < len(lines) < 12
    assert click.count == 2


def test_again_with_another_learning_rate_takes_three_clicks(
    window: Window, site: Site, runs: list[str], click: Clicks
) -> None:
    run = runs[4]
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


def test_stop_all_above_ten_dollars_an_hour_takes_three_clicks(
    window: Window, site: Site, runs: list[str], click: Clicks
) -> None:
    page = window.open("/")
    page.keyboard.press("/")
    page.keyboard.type("rate>10")
    page.keyboard.press("Enter")
    expect(page.locator("[data-run]")).to_have_count(2)
    expect(page.locator('[data-total="rate"]')).to_have_text("$32.00")
    click(page.get_by_label("Select all on this page"))
    click(page.get_by_role("button", name="Stop"))
    click(page.get_by_role("button", name="Stop 2 runs"))
    expect(page.get_by_text("2 stopping")).to_be_visible()
    stopped = (
        f"print(*Run.objects.filter(pk__in={runs}, state='stopping').values_list('pk', flat=True))"
    )
    answer = site.python("from runs.models import Run\n" + stopped).split()
    assert sorted(answer) == sorted(runs[1:3])
    assert click.count == 3
