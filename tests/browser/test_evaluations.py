"""The Evaluations tab: charts and results, the form, and results that arrive live."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Site, Window

pytestmark = pytest.mark.browser

SEED = """
from tests.browser import seed_evaluations as e
run = seed.run(seed.user('olga', 'operator'), name='Evaluated', committed=12)
plan = e.evaluations(run, 2, 4, 6, 8, name='val', tasks=e.TASKS)
e.queue(plan, 10, state='failed', message='data: expected token shards, found none')
e.queue(plan, 12, state='running')
print(run.pk)
"""
LATER = """
from runs.models import Event, Run
from tests.browser import seed_evaluations as e
run = Run.objects.get(pk={run!r})
plan = e.evaluations(run, 6, 12, name='own')
"""


@pytest.fixture(scope="module")
def evaluated(site: Site) -> str:
    return site.python(SEED)


def test_results_are_drawn_and_listed_and_a_new_one_appears(
    window: Window, site: Site, evaluated: str
) -> None:
    page = window.open(f"/runs/{evaluated}/?tab=evaluations", width=390)
    tab = page.locator('[data-panel="evaluations"]')
    expect(tab.locator("[data-plot]")).to_have_count(4)
    chart = tab.locator('[data-plot="m:eval-val-perplexity"]')
    expect(chart.locator(".u-wrap canvas")).to_be_visible()
    expect(chart.get_by_role("heading")).to_have_text("val: perplexity")
    rows = tab.get_by_role("table").get_by_role("row")
    expect(rows).to_have_count(7)
    expect(rows.nth(2)).to_contain_text("data: expected token shards, found none")
    rows.nth(2).get_by_text("Log").click()
    expect(rows.nth(2)).to_contain_text("reading the shards")
    expect(tab.get_by_role("button", name="Round", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    expect(page.locator('[data-plot="m:eval-val-loss"] .u-wrap canvas')).to_be_visible()
    window.fits(page, "evaluations", 390, 1280)
    page.reload()  # an open log is not replaced
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    site.python(LATER.format(run=evaluated))
    site.publish(evaluated, events=[event_row(10_000)])
    expect(tab.get_by_role("heading", name="own", exact=True)).to_be_visible()
    added = tab.locator('[data-plot="m:eval-own-perplexity"]')
    expect(added.locator(".u-wrap canvas")).to_be_visible()


def event_row(number: int) -> dict[str, object]:
    return {
        "id": number, "at": "2030-01-01T00:00:00.000Z", "level": "info", "kind": "evaluation",
        "replica": None, "actor": None, "from_state": "", "to_state": "", "message": "own of 12",
    }  # fmt: skip


def test_an_evaluation_is_added_changed_and_removed(window: Window, site: Site) -> None:
    run = site.seed("name='To evaluate', committed=3")
    page = window.open(f"/runs/{run}/?tab=evaluations")
    page.get_by_role("link", name="Add an evaluation").click()
    page.get_by_label("Name", exact=True).fill("My val")
    page.get_by_label("Tokens", exact=True).fill("0")
    page.get_by_role("button", name="Add evaluation").click()
    expect(page.get_by_text("Enter a number of tokens or a task, found neither")).to_be_visible()
    window.shoot(page, "evaluation-form-errors")
    page.get_by_label("Tokens", exact=True).fill("1000")
    page.get_by_role("button", name="Add evaluation").click()
    expect(page.get_by_text("lower-case letters, digits and hyphens")).to_be_visible()
    page.get_by_label("Name", exact=True).fill("val")
    page.get_by_role("button", name="Add evaluation").click()
    expect(page).to_have_url(re.compile("tab=evaluations"))
    page.get_by_role("button", name="Evaluate newest").click()
    expect(page.get_by_text("expected a checkpoint, found none yet")).to_be_visible()
    page.get_by_role("link", name="Settings of val").click()
    page.get_by_label("When").select_option(label="Every 5 checkpoints")
    page.get_by_role("button", name="Save").click()
    expect(page.locator('[data-panel="evaluations"]')).to_contain_text("every 5 checkpoints")
    page.get_by_role("link", name="Settings of val").click()
    page.get_by_role("button", name="Remove evaluation").click()
    expect(page.locator('[data-panel="evaluations"]')).not_to_contain_text("every 5 checkpoints")
    window.errors[:] = [e for e in window.errors if "422" not in e]
