"""Actions on a run: pause, resume, save, notes, fork, delete."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Site, Window

pytestmark = pytest.mark.browser


@pytest.fixture
def demo(site: Site) -> str:
    return site.seed("name='Watched', committed=6")


def is_live(page: Page) -> None:
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")


def state(site: Site, run: str, **fields: Any) -> None:
    site.python(f"from runs.models import Run\nRun.objects.filter(pk={run!r}).update(**{fields!r})")


def more(page: Page) -> Any:
    page.get_by_label("More actions").click()
    return page.locator(".menu-items")


def test_pause_and_resume(window: Window, site: Site, demo: str) -> None:
    page = window.open(f"/runs/{demo}/")
    is_live(page)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator('[data-s="state"]')).to_have_text("pausing")
    expect(page.get_by_text("it costs nothing once")).to_be_visible()
    state(site, demo, state="paused", state_reason="all machines are released")
    page.reload()
    is_live(page)
    window.shoot(page, "life-paused", full=False)
    page.get_by_role("button", name="Resume").click()
    expect(page.locator('[data-s="state"]')).to_have_text("queued")
    expect(page.get_by_role("button", name="Resume")).to_be_hidden()


def test_menu_by_keyboard_and_buttons_that_follow_the_run(
    window: Window, site: Site, demo: str
) -> None:
    page = window.open(f"/runs/{demo}/")
    is_live(page)
    summary = page.get_by_label("More actions")
    summary.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Save now")).to_be_visible()
    window.shoot(page, "life-menu", full=False)
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Save now")).to_be_hidden()
    expect(summary).to_be_focused()
    more(page).get_by_role("button", name="Save now").click()
    expect(page.get_by_text("saved as a checkpoint")).to_be_visible()
    is_live(page)
    header = site.python(
        "import json\nfrom runs.queries import selectors\nfrom runs.models import Run\n"
        f"print(json.dumps(selectors.run_header(Run.objects.get(pk={demo!r}))))"
    )
    site.publish(demo, run=json.loads(header) | {"state": "paused"})
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()


def test_notes_and_tags(window: Window, demo: str) -> None:
    page = window.open(f"/runs/{demo}/", width=360, height=800)
    more(page)
    window.shoot(page, "life-menu-360", full=False)
    page.keyboard.press("Escape")
    page.get_by_text("Add notes and tags").click()
    page.get_by_role("textbox", name="Tags").fill("baseline h-90 " + "x" * 40)
    page.get_by_role("textbox", name="Notes").fill(
        "Reason for this run.\nTwice the momentum of the previous run."
    )
    window.shoot(page, "life-describe", full=False)
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".tag")).to_have_count(3)
    expect(page.locator(".notes")).to_contain_text("Twice the momentum")
    window.shoot(page, "life-described", full=False)


def test_fork_opens_the_form(window: Window, site: Site, demo: str) -> None:
    site.python(
        "from django.utils import timezone\nfrom runs.models import Checkpoint\n"
        f"Checkpoint.objects.create(run_id={demo!r}, round=5, key='k', size_bytes=1, digest='d', "
        "created_at=timezone.now())"
    )
    page = window.open(f"/runs/{demo}/", scheme="dark")
    menu = more(page)
    window.shoot(page, "life-menu-dark", full=False)
    menu.get_by_role("link", name="Fork").click()
    expect(page.get_by_role("heading", name=re.compile("weights of Watched"))).to_be_visible()
    expect(page.get_by_label("Round", exact=True)).to_be_visible()
    expect(page.get_by_label("Name", exact=True)).to_have_value(re.compile("from round"))
    window.shoot(page, "life-fork", full=False)


def test_delete_requires_the_name(window: Window, site: Site, demo: str) -> None:
    state(site, demo, state="failed", state_reason="all replicas have ended")
    page = window.open(f"/runs/{demo}/")
    window.shoot(page, "life-failed", full=False)
    more(page).get_by_role("link", name="Delete").click()
    page.get_by_label("Type the name of the run").fill("watched")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("alert")).to_contain_text("Expected the name of the run")
    window.shoot(page, "life-delete", full=False)
    window.errors[:] = [e for e in window.errors if "422" not in e]
    page.get_by_label("Type the name of the run").fill("Watched")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("Deleting Watched")).to_be_visible()
