"""Tabs of the run page that are read more than drawn: logs and checkpoints."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import Site, Window

pytestmark = pytest.mark.browser

HUB = """
from tests.browser import seed_usage
from runs.models import Credential
run = seed.run(seed.user('olga', 'operator'), name={name!r}, state='cancelled')
seed_usage.checkpoints(run, 0, 4, 8, 12, final={final})
Credential.objects.get_or_create(name='hub of acme', defaults=dict(
    kind='huggingface', sealed='x', fields=['HF_TOKEN'],
    created_at=run.created_at, changed_at=run.created_at))
print(run.pk)
"""


@pytest.fixture(scope="module")
def demo(site: Site) -> str:
    return site.seed("name='Told much', committed=12")


def test_log_lines_are_searched_filtered_and_linked(window: Window, demo: str) -> None:
    page = window.open(f"/runs/{demo}/?tab=logs")
    card = page.locator("[data-logs-card]")
    lines = card.locator("[data-lines] p")
    expect(lines).to_have_count(12)
    expect(card.locator("[data-follow]")).to_have_text("following")
    card.get_by_label("Search").fill("retried")
    card.get_by_label("Search").press("Enter")
    expect(lines).to_have_count(4)
    assert "q=retried" in page.url
    card.get_by_label("Replica").select_option(label="Replica 1")
    expect(lines).to_have_count(1)
    card.get_by_label("Level").select_option(label="Errors")
    expect(card.locator("[data-lines]")).to_contain_text("No line is like that.")
    page.reload()
    expect(card.get_by_label("Search")).to_have_value("retried")
    expect(card.get_by_label("Replica")).to_have_value("1")
    card.get_by_label("Level").select_option(label="All levels")
    lines.first.get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"tab=logs&line=\d+"))
    expect(card.locator("p[aria-current]")).to_contain_text("upload retried once")
    expect(card.locator("[data-follow]")).to_contain_text("around line")
    expect(lines).to_have_count(12)
    window.shoot(page, "logs-line", full=False)


def test_all_lines_are_downloaded(window: Window, demo: str) -> None:
    page = window.open(f"/runs/{demo}/?tab=logs")
    with page.expect_download() as found:
        page.get_by_role("link", name="Download all").click()
    with found.value.path().open() as file:
        assert len(file.readlines()) == 12


def test_news_on_its_way_does_not_close_what_was_opened(window: Window, site: Site) -> None:
    run = site.python(HUB.format(name="Kept", final=True))
    page = window.open(f"/runs/{run}/")
    held: list[Route] = []
    page.route("**/checkpoints", lambda route: held.append(route))
    with page.expect_request("**/checkpoints"):
        page.get_by_role("link", name="Checkpoints").click()
    details = page.locator("table.checkpoints details").first
    details.locator("summary").click()
    page.evaluate("document.activeElement.blur()")
    with page.expect_response("**/checkpoints"):
        held[0].continue_()
    page.evaluate("() => new Promise(requestAnimationFrame)")
    expect(details.get_by_role("button", name="Upload")).to_be_visible()


def test_checkpoints_with_what_can_be_done(window: Window, site: Site) -> None:
    run = site.python(HUB.format(name="Kept " * 15, final=True))
    page = window.open(f"/runs/{run}/?tab=checkpoints")
    table = page.locator("table.checkpoints")
    expect(table.locator("tbody tr")).to_have_count(5)
    expect(table.get_by_role("row").nth(1)).to_contain_text("Final, round 12")
    expect(table.get_by_role("link", name="Fork from round 12")).to_be_visible()
    details = table.locator("details").first
    details.locator("summary").click()
    details.get_by_label("Repository").fill("acme/small-model")
    window.shoot(page, "checkpoints-form")
    details.get_by_role("button", name="Upload").click()
    expect(page.get_by_text("A worker uploads it")).to_be_visible()
    expect(page.get_by_role("heading", name="Uploads to the Hub")).to_be_visible()
    panel = page.locator("[data-panel=checkpoints]")
    expect(panel.get_by_text("final @ 12 is uploaded to acme/small-model")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures(window: Window, site: Site, demo: str, scheme: str) -> None:
    kept = site.python(HUB.format(name="A run whose name is long " * 3, final=False))
    for width in (1280, 360):
        for name, run in (("checkpoints", kept), ("logs", demo)):
            page = window.open(f"/runs/{run}/?tab={name}", width=width, scheme=scheme)
            expect(page.locator(".conn")).not_to_have_attribute("data-state", "connecting")
            first = "[data-lines] p" if name == "logs" else "table.checkpoints"
            expect(page.locator(first).first).to_be_visible()
            window.shoot(page, f"{name}-{width}-{scheme}")
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_round_says_who_was_waited_for(window: Window, site: Site) -> None:
    run = site.seed("name='Waited for', committed=12")
    site.python(
        "from runs.models import Contribution\n"
        f"mine = Contribution.objects.filter(round__run={run!r}, round__number=7)\n"
        "for c in mine: c.phases = {**c.phases, 'wait': 0.1 if c.replica.number == 2 else 0.9}; "
        "c.save()"
    )
    page = window.open(f"/runs/{run}/?tab=rounds&round=7")
    facts = page.locator("[data-round-detail] dl")
    expect(facts).to_contain_text("replica 2, 0.80 s")
    expect(facts).to_contain_text("Outer learning rate")
    row = page.locator(".rounds-table tr[aria-current]")
    expect(row).to_contain_text("replica 2, 0.80 s")
    headings = page.locator(".rounds-table thead th")
    expect(headings).to_have_text([
        "Round", "State", "Contributors", "Without", "Train loss", "Eval loss", "Tokens", "Norm",
        "Moved", "Plan", "Straggler", "Opened", "Committed", "Why",
    ])  # fmt: skip
    window.shoot(page, "rounds-1440")
    for width in (1280, 360):
        page = window.open(f"/runs/{run}/?tab=rounds&round=7", width=width)
        expect(page.locator("[data-round-detail] dl")).to_contain_text("replica 2")
        window.shoot(page, f"rounds-{width}")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_replica_that_works_on_an_old_round_is_stale(window: Window, site: Site) -> None:
    run = site.seed("name='Behind', committed=12")
    site.python(
        "from runs.models import Replica\n"
        f"Replica.objects.filter(run={run!r}, number=3).update(round=9)"
    )
    page = window.open(f"/runs/{run}/?tab=replicas")
    stale = page.locator('[data-replicas="long"] [data-c="behind"]')
    expect(stale).to_have_text(["0", "0", "0", "4"])


def test_on_the_way_to_the_first_round_each_phase_says_how_far_it_is(
    window: Window, site: Site
) -> None:
    run = site.seed("name='Underway', state='provisioning', committed=0, replicas=2")
    site.python(
        "from runs.models import Replica\n"
        f"mine = Replica.objects.filter(run={run!r})\n"
        "mine.update(state='provisioning', backend_state='pending', step=0)"
    )
    page = window.open(f"/runs/{run}/")
    items = page.locator("[data-checklist-items] li")
    expect(items).to_have_count(6)
    expect(items.nth(0)).to_contain_text("done after 1.0 s")
    expect(items.nth(1)).to_contain_text("done")
    expect(items.nth(2)).to_contain_text(re.compile(r"Image.*backend says pending · \d"))
    expect(items.nth(4)).to_contain_text("0 of 2 train")
    window.shoot(page, "checklist-1440", full=False)
    page = window.open(f"/runs/{run}/", width=360)
    expect(items).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
