"""The failure card appears when a run fails, and a message is shown in full once."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Route, expect

from tests.browser.accessibility import Contrast, problems_in_both_schemes
from tests.browser.conftest import Site, Window, eventually

pytestmark = pytest.mark.browser

FAIL = """
from datetime import timedelta
from django.utils import timezone
from runs.models import Event, Replica, ReplicaAttempt, Run
from runs.queries import selectors
from runs.live_stream import publish
run, now = Run.objects.get(pk={run!r}), timezone.now()
replica = run.replicas.get(number=1)
message = 'OOMKilled: the container used more than its 24Gi\\nLast State: Terminated'
ReplicaAttempt.objects.create(
    replica=replica, number=1, launch_key=str(run.pk), created_at=run.created_at,
    launched_at=run.created_at, ended_at=now, cause='out_of_memory', exit_code=137, message=message)
reason = 'out of memory, exit code 137: ' + message
run.replicas.update(state='failed', state_since=now, state_reason=reason)
Run.objects.filter(pk=run.pk).update(
    state='failed', state_since=now, state_reason='replica 1: ' + reason,
    ended_at=now + timedelta(hours=1))  # the page loads a run again 30 s after its end
for text in (reason, 'replica 1: ' + reason):
    Event.objects.create(run=run, at=now, kind='run_state', from_state='running',
        to_state='failed', level='error', message=text)
run = selectors.with_header(Run.objects.filter(pk=run.pk)).get()
snapshot = selectors.snapshot(run, curves=False)
publish(str(run.pk), {{name: snapshot[name] for name in ('run', 'replicas', 'events')}})
"""


LINES = "24Gi\nLast State: Terminated"


def test_card_appears_when_the_run_fails(window: Window, site: Site) -> None:
    run = site.seed("name='Fails', committed=6")
    page = window.open(f"/runs/{run}/")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    expect(page.locator("[data-failure] section")).to_have_count(0)
    site.python(FAIL.format(run=run))
    card = page.get_by_role("region", name="Replica 1 failed: out of memory")
    expect(card).to_be_visible()
    expect(card.get_by_role("group", name="Last log lines")).to_contain_text("upload retried")
    expect(card.get_by_role("button", name="Resume")).to_be_visible()
    message = card.locator(".failure-message")
    expect(message).to_have_text(re.compile(LINES), use_inner_text=True)
    expect(page.locator(".events li").first).to_contain_text("OOMKilled")
    expect(page.locator('[data-s="why"]')).to_be_empty()
    overview = page.locator('[data-panel="overview"]').inner_text()
    assert len(re.findall("Last State: Terminated", overview)) == 1
    window.shoot(page, "failure-1440", full=False)
    page.get_by_role("link", name="Activity", exact=True).click()
    rows = page.locator('[data-panel="activity"] .activity-what')
    eventually(page, rows.all_inner_texts, lambda texts: sum(LINES in one for one in texts) == 2)
    page.go_back()
    page.locator('[data-rail-replicas] [data-drawer-link="replica-1"]').click()
    drawer = page.get_by_role("complementary", name="Details")
    in_drawer = drawer.get_by_role("region", name="Replica 1 failed: out of memory")
    expect(in_drawer.locator(".failure-message")).to_have_text(
        re.compile(LINES), use_inner_text=True
    )
    expect(page.locator("#h-failure")).to_have_count(1)  # an id names one card
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    # An answer that comes after the run was resumed is not shown.
    held: list[Route] = []
    page.route("**/?part=failure", lambda route: held.append(route))
    site.publish(run, run={"state_since": "2026-01-01T00:00:00Z"})
    eventually(page, lambda: len(held), lambda number: number == 1)
    answer = held[0].fetch()
    site.publish(run, run={"state": "queued"})
    expect(card).to_have_count(0)
    held[0].fulfill(response=answer)
    page.evaluate("() => fetch(location.href).then(() => null)")  # it was handled
    expect(card).to_have_count(0)
    page.unroute("**/?part=failure")
    site.publish(run, run={"state": "failed"})
    card.get_by_role("link", name="Open log").click()
    expect(page.locator("#h-log")).to_be_in_viewport()


@pytest.mark.slow
def test_failed_pages_fit_and_are_accessible(
    window: Window, site: Site, contrast: Contrast
) -> None:
    run = site.seed("name='Fails', state='failed', committed=6")
    site.python(
        FAIL.format(run=run)
        + "from tests.browser import seed_usage\nseed_usage.add_traceback(run, 1)"
    )
    for path in (f"/runs/{run}/", f"/runs/{run}/replicas/1/"):
        page = window.open(path, width=360)
        expect(page.get_by_role("group", name="Traceback", exact=True)).to_be_visible()
        window.fits(page, f"failure-{len(path)}", 360, 1440, full=False)
        part = "main" if "replicas" in path else ".failure"
        assert problems_in_both_schemes(page, path, contrast, part) == []
