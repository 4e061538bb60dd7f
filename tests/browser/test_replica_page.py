"""The page of a replica: its curves with the range of the group, its rounds, its last traceback."""

from __future__ import annotations

import re
import time

import pytest
from django.utils import timezone
from playwright.sync_api import Route, expect

from tests.browser.conftest import BLANK, NO_SHARED_WORKER, Site, Window, eventually

pytestmark = pytest.mark.browser

SEED = """
from tests.browser import seed_fleet, seed_usage
from django.utils import timezone
run = seed.run(seed.user('olga', 'operator'), name={name!r}, replicas={replicas}, state={state!r})
seed_usage.used(run)
seed_usage.add_traceback(run, 0)
for r in run.replicas.all():
    seed_fleet.attempts(r, backend='modal', price=3.95, earlier=2, now=timezone.now())
    r.attempts.update(handle={{'backend': 'modal', 'launch_key': 'k', 'data': {{'id': 'sb-1'}}}})
print(run.pk)
"""


def make(site: Site, replicas: int = 4, name: str = "Four replicas", state: str = "running") -> str:
    return site.python(SEED.format(replicas=replicas, name=name, state=state))


def test_curves_are_drawn_over_the_range_of_the_group(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{make(site)}/replicas/2/")
    for name in ("loss", "step_s", "grad", "memory", "cpu", "gpu", "gpu_memory", "up"):
        legend = page.locator(f'[data-plot="{name}"] [data-legend] button')
        for place, text in enumerate(("Minimum to maximum", "Mean", "Replica 2")):
            expect(legend.nth(place)).to_contain_text(text)
    page.locator('[data-plot="cpu"] [data-chart]').press("ArrowLeft")
    expect(page.locator('[data-plot="cpu"] [data-announce]')).to_contain_text("Replica 2 1.")


def test_new_point_is_drawn(window: Window, site: Site) -> None:
    run = make(site)
    page = window.open(f"/runs/{run}/replicas/2/?smooth=0")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    value = page.locator('[data-plot="memory"] [data-id="r2"] output')
    expect(value).to_have_text("2.41 GB")
    now = time.time()
    site.publish(
        run,
        points=[
            {
                "series": "rss_bytes",
                "replica": 2,
                "step": [600],
                "round": [15],
                "tokens": [600 * 512],
                "wall_s": [now],
                "value": [9.9e9],
                "nonfinite": [],
                "total": 1,
            }
        ],
    )
    expect(value).to_have_text("9.90 GB")


def test_rounds_jobs_and_the_last_traceback(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{make(site)}/replicas/0/")
    expect(page.get_by_role("heading", name="Last traceback")).to_be_visible()
    expect(page.get_by_role("group", name="Traceback", exact=True)).to_contain_text(
        "CUDA out of memory"
    )
    rounds = page.locator("table", has=page.locator("caption", has_text="The newest rounds"))
    expect(rounds.get_by_role("row")).to_have_count(14)
    expect(page.locator("svg.phase-strip")).to_have_attribute("aria-label", re.compile("compute"))
    job = page.get_by_role("link", name="-0-3")
    expect(job).to_have_attribute("href", re.compile("^https://modal.com/id/"))
    rounds.get_by_role("link", name="12", exact=True).click()
    expect(page).to_have_url(re.compile("tab=rounds&round=12"))


def test_layout(window: Window, site: Site) -> None:
    many = make(site, replicas=24, name="A run whose name is long " * 3)
    page = window.open(f"/runs/{many}/replicas/0/", width=360)
    expect(page.locator('[data-plot="up"] [data-legend] button')).not_to_have_count(0)
    window.fits(page, "replica", 360, 1280, 360)


def test_replica_that_was_never_launched(window: Window, site: Site) -> None:
    run = site.seed("name='Waiting', state='queued', committed=0, replicas=1")
    page = window.open(f"/runs/{run}/replicas/0/")
    expect(page.get_by_text("No rounds yet.")).to_be_visible()
    chart = page.locator('[data-plot="loss"] [data-chart]')
    expect(chart).to_have_attribute("data-empty", "Data appears after the first step")
    expect(page.get_by_role("heading", name="Last traceback")).to_have_count(0)
    window.shoot(page, "replica-none")


OLD = """
from django.utils import timezone
from datetime import timedelta
from runs.backends import health
from runs.models import Run
ago = timedelta(seconds=health.STALE_RUN_S + 5 if {old} else 0)
Run.objects.filter(pk={run!r}).update(last_seen_at=timezone.now() - ago)
print((timezone.now()).isoformat())
"""
WORKER = """
from runs import live_stream as live
from runs.backends import health
live.client().set(health.HEARTBEAT, {at})
"""


def test_banner_without_recent_data(window: Window, site: Site) -> None:
    run = make(site)
    site.python(OLD.format(run=run, old=True))
    page = window.open(f"/runs/{run}/replicas/2/")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    stale = page.locator("[data-banner=stale]")
    expect(stale).to_contain_text("No data for 3 min.")
    window.shoot(page, "replica-stale", full=False)
    now = site.python(OLD.format(run=run, old=False))
    site.publish(run, run={"state": "running", "last_seen_at": now})
    expect(stale).to_be_hidden()


def test_a_delta_between_the_page_and_its_stream_is_not_lost(window: Window, site: Site) -> None:
    run = make(site)
    site.python(OLD.format(run=run, old=True))
    page = window.open(BLANK, alone=True)
    page.add_init_script(NO_SHARED_WORKER)
    now = timezone.now().isoformat()

    def connect(route: Route) -> None:
        site.publish(run, run={"state": "running", "last_seen_at": now})
        route.continue_()

    page.route("**/stream?*", connect)
    page.goto(f"/runs/{run}/replicas/2/")
    expect(page.locator("[data-banner=stale]")).to_be_hidden()


def test_an_answer_that_is_older_than_a_delta_does_not_replace_it(
    window: Window, site: Site
) -> None:
    run = make(site)
    site.python(OLD.format(run=run, old=True))
    page = window.open(f"/runs/{run}/replicas/2/")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    held: list[Route] = []
    page.route("**/replicas/2/?part=1", lambda route: held.append(route))
    site.publish(run, run={"state": "running"}, replicas=[{"number": 2, "state": "failed"}])
    (request,) = eventually(page, lambda: held, bool)
    old = request.fetch()
    now = timezone.now().isoformat()
    site.publish(run, run={"state": "running", "last_seen_at": now})
    stale = page.locator("[data-banner=stale]")
    expect(stale).to_be_hidden()
    request.fulfill(response=old)
    site.publish(run, replicas=[{"number": 2, "state": "lost"}])
    _, request = eventually(page, lambda: held, lambda held: len(held) == 2)
    request.continue_()  # sent after the old answer was shown
    expect(stale).to_be_hidden()


def test_banner_without_a_worker_disappears_with_the_next_delta(window: Window, site: Site) -> None:
    run = make(site)
    try:
        site.python(WORKER.format(at=1))
        page = window.open(f"/runs/{run}/replicas/2/")
        silent = page.locator("[data-banner=silent]")
        expect(silent).to_contain_text("No worker is running")
        expect(page.locator(".conn")).to_have_text("No worker")
    finally:
        site.python(WORKER.format(at=time.time()))
    site.publish(run, run={"state": "running"})
    expect(silent).to_be_hidden()
    expect(page.locator(".conn")).to_have_text("Live")
