"""Tabs of the run page: logs, checkpoints, rounds, replicas, and the startup checklist."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import Site, Window, eventually, expect_address

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


SHOWN_AGAIN = """(filter) => {
    document.querySelector(filter).dispatchEvent(new Event("change", { bubbles: true }));
    document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture(scope="module")
def demo(site: Site) -> str:
    return site.seed("name='Many log lines', committed=12")


def test_log_lines_are_downloaded_searched_filtered_and_linked(window: Window, demo: str) -> None:
    page = window.open(f"/runs/{demo}/?tab=logs")
    card = page.locator("[data-logs-card]")
    lines = card.locator("[data-lines] p")
    expect(lines).to_have_count(12)
    expect(card.locator("[data-follow]")).to_have_text("following")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download .txt").click()
    with download.value.path().open() as file:
        assert len(file.readlines()) == 12
    card.get_by_label("Replica").select_option(label="Replica 1")
    expect(lines).to_have_count(3)
    expect(lines.first).to_contain_text("replica 1")
    card.get_by_label("Replica").select_option(index=0)
    expect(lines).to_have_count(12)
    # A tab that is shown again while a request is under way has each line once.
    answers: list[str] = []
    page.on("response", lambda r: answers.append(r.url) if "after=0" in r.url else None)
    page.evaluate(SHOWN_AGAIN, "[data-who]")
    eventually(page, lambda: len(answers), lambda number: number == 2)
    page.evaluate("() => fetch(location.href).then(() => null)")  # both were handled
    expect(lines).to_have_count(12)
    card.get_by_label("Search").fill("retried")
    card.get_by_label("Search").press("Enter")
    expect(lines).to_have_count(4)
    expect_address(page, "q=retried")
    card.get_by_label("Replica").select_option(label="Replica 1")
    expect(lines).to_have_count(1)
    card.get_by_label("Level").select_option(label="Errors")
    expect(card.locator("[data-lines]")).to_contain_text("No matching lines.")
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


def test_refresh_in_flight_does_not_close_an_open_form(window: Window, site: Site) -> None:
    run = site.python(HUB.format(name="Kept", final=True))
    page = window.open(f"/runs/{run}/")
    delayed: list[Route] = []
    page.route("**/checkpoints", lambda route: delayed.append(route))
    with page.expect_request("**/checkpoints"):
        page.get_by_role("link", name="Checkpoints").click()
    details = page.locator("table.checkpoints details").first
    details.locator("summary").click()
    page.evaluate("document.activeElement.blur()")
    with page.expect_response("**/checkpoints"):
        delayed[0].continue_()
    page.evaluate("() => new Promise(requestAnimationFrame)")
    expect(details.get_by_role("button", name="Upload")).to_be_visible()


def test_a_change_during_a_refresh_is_refreshed_after_it(window: Window, site: Site) -> None:
    page = window.open(f"/runs/{(run := site.seed('committed=6'))}/")
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    delayed: list[Route] = []
    page.route("**/checkpoints", lambda route: delayed.append(route))
    with page.expect_request("**/checkpoints"):
        page.get_by_role("link", name="Checkpoints").click()
    site.publish(run, run={"committed_rounds": 11, "eval_loss": 1.25})
    expect(page.locator('[data-s="eval_loss"]')).to_have_text("1.250")  # the change arrived
    with page.expect_request("**/checkpoints"):
        delayed[0].continue_()


def test_actions_on_checkpoints(window: Window, site: Site) -> None:
    run = site.python(HUB.format(name="Kept " * 15, final=True))
    page = window.open(f"/runs/{run}/?tab=checkpoints")
    table = page.locator("table.checkpoints")
    expect(table.locator("tbody tr")).to_have_count(5)
    expect(table.get_by_role("row").nth(1)).to_contain_text("Final, round 12")
    expect(table.get_by_role("link", name="Fork from round 12")).to_be_visible()
    details = table.locator("details").first
    details.locator("summary").click()
    details.get_by_role("textbox", name="Repository").fill("acme/small-model")
    window.shoot(page, "checkpoints-form")
    details.get_by_role("button", name="Upload").click()
    expect(page.get_by_text("Upload started")).to_be_visible()
    expect(page.get_by_role("heading", name="Uploads to the Hub")).to_be_visible()
    panel = page.locator("[data-panel=checkpoints]")
    expect(panel.get_by_text("final @ 12 is uploaded to acme/small-model")).to_be_visible()


def test_layout(window: Window, site: Site, demo: str) -> None:
    kept = site.python(HUB.format(name="A run whose name is long " * 3, final=False))
    for name, run in (("checkpoints", kept), ("logs", demo)):
        page = window.open(f"/runs/{run}/?tab={name}", width=360)
        expect(page.locator(".conn")).not_to_have_attribute("data-state", "connecting")
        first = "[data-lines] p" if name == "logs" else "table.checkpoints"
        expect(page.locator(first).first).to_be_visible()
        window.fits(page, name, 360, 1280, 360)


def test_round_names_its_straggler(window: Window, site: Site) -> None:
    run = site.seed("name='Straggler', committed=12")
    site.python(
        "from runs.metrics import round_strips\nfrom runs.models import Contribution, Round\n"
        f"rows = Contribution.objects.filter(round__run={run!r}, round__number=7)\n"
        "for c in rows: c.phases = {**c.phases, 'wait': 0.1 if c.replica.number == 2 else 0.9}; "
        "c.save()\n"
        f"round_strips.rebuild(Round.objects.get(run={run!r}, number=7))"
    )
    page = window.open(f"/runs/{run}/?tab=rounds&round=7", width=360)
    facts = page.locator("[data-round-detail] dl")
    expect(facts).to_contain_text("replica 2, 0.80 s")
    expect(facts).to_contain_text("Outer learning rate")
    row = page.locator(".rounds-table tr[aria-current]")
    expect(row).to_contain_text("replica 2, 0.80 s")
    headings = page.locator(".rounds-table thead th")
    first = ["Round", "State", "Contributors", "Not included", "Train loss", "Eval loss", "Tokens"]
    last = ["Norm", "Traffic", "Plan", "Straggler", "Opened", "Committed", "Reason"]
    expect(headings).to_have_text(first + last)
    window.fits(page, "rounds", 360, 1280)


OVERLAPS = """table => [...table.querySelectorAll(".c-act button")].flatMap((button) => {
  const { left, right } = button.getBoundingClientRect();
  const own = table.tHead.rows[0].cells[button.parentElement.cellIndex];
  return [...table.tHead.rows[0].cells].filter((head) => {
    const box = head.getBoundingClientRect();
    return head !== own && box.left < right && left < box.right;
  }).map((head) => head.textContent);
})"""
"""Names of the columns that a button of another column covers."""


def test_replica_table_fits_and_covers_no_column(window: Window, site: Site) -> None:
    run = site.seed("name='Wide', committed=12")
    page = window.open(f"/runs/{run}/?tab=replicas", width=1280)
    table = page.locator("[data-replicas=long] table")
    expect(table.locator("tbody tr")).to_have_count(4)
    expect(page.locator("[data-conn]")).to_have_attribute("data-state", "live")
    now = datetime.now(UTC).isoformat()
    rows = [
        {"number": number, "state": "computing", "backend_state": "RUNNING", "gpu_busy": 0.93}
        | {"gpu_memory_bytes": 71e9, "up_bytes_per_s": 123e6, "down_bytes_per_s": 456e6}
        | {"deadline_at": "2999-01-01T00:00:00Z", "device": "NVIDIA H100 80GB HBM3"}
        | {"restarts": 1, "attempt": 2, "cost_usd": 12.34, "price_usd_h": 4.0}
        | {"round": 5000, "step": 200_000, "loss": 2.345, "tokens_per_s": 56_789.0}
        | {"wait_fraction": 0.27, "beat_at": now, "cost_known": False}
        | {"last_cause": "out_of_memory", "last_ended_at": now}
        | {"state_reason": "restart 2 of 3 in 8 s, after: 503 Service Unavailable\nsecond line"}
        for number in range(4)
    ]
    site.publish(run, replicas=rows)
    expect(table).to_contain_text("H100")
    expect(table.locator('[data-c="net"]').first).to_contain_text("456 MB/s ↓")
    for width in (1280, 1440):
        window.fits(page, "replicas-wide", width, full=False)
        beyond = "table => table.scrollWidth - table.closest('.scroll').clientWidth"
        assert table.evaluate(beyond) <= 0, width
        assert table.evaluate(OVERLAPS) == [], width


def test_replica_row_shows_its_story(window: Window, site: Site) -> None:
    run = site.seed("name='Preempted', committed=12")
    site.python(
        "from datetime import timedelta\nfrom django.utils import timezone\n"
        "from runs.models import Replica\nfrom tests.browser import seed_fleet\n"
        f"replica = Replica.objects.get(run={run!r}, number=3)\n"
        "seed_fleet.attempts(replica, backend='modal', price=1.0, earlier=1, now=timezone.now())\n"
        "replica.attempts.filter(number=1).update("
        "ended_at=timezone.now() - timedelta(minutes=5, seconds=1))"
    )
    page = window.open(f"/runs/{run}/?tab=replicas")
    row = page.locator('[data-replicas="long"] tr[data-key="3"]')
    story = row.locator("[data-story]")
    expect(story).to_have_text("preempted 5 min ago → replaced, training again")
    others = page.locator('[data-replicas="long"] tr[data-key="0"] [data-story]')
    expect(others).to_be_hidden()
    expect(page.locator(".conn")).to_have_attribute("data-state", "live")
    rows = json.loads(
        site.python(
            "import json\nfrom runs.models import Run\nfrom runs.queries import fleet\n"
            f"print(json.dumps(fleet.replica_rows(Run.objects.get(pk={run!r}))))"
        )
    )
    for state, text in (("restarting", "waiting for"), ("provisioning", "replacement is starting")):
        site.publish(run, replicas=[rows[3] | {"state": state}])
        expect(story).to_contain_text(text)
    window.shoot(page, "replica-story", full=False)


def test_silent_replica_shows_no_pace_and_a_late_one_its_distance(
    window: Window, site: Site
) -> None:
    run = site.seed("name='One is silent, one behind', committed=12")
    site.python(
        "from datetime import timedelta\nfrom django.utils import timezone\n"
        "from runs.models import Replica\n"
        f"Replica.objects.filter(run={run!r}, number=3).update(round=9)\n"
        f"Replica.objects.filter(run={run!r}, number=2).update("
        "beat_at=timezone.now() - timedelta(minutes=38))"
    )
    page = window.open(f"/runs/{run}/?tab=replicas")
    rows = page.locator('[data-replicas="long"] tbody tr')
    expect(rows.nth(2).locator('[data-c="beat"]')).to_have_text("38 min ago")
    expect(rows.nth(2).locator('[data-c="speed"]')).to_have_text("–")
    expect(rows.nth(1).locator('[data-c="speed"]')).to_contain_text("5,")
    expect(rows.locator('[data-c="behind"]')).to_have_text(["", "", "", "4 behind"])


def test_startup_checklist_shows_the_progress(window: Window, site: Site) -> None:
    run = site.seed("name='Underway', state='provisioning', committed=0, replicas=2")
    site.python(
        "from runs.models import Replica\n"
        f"replicas = Replica.objects.filter(run={run!r})\n"
        "replicas.update(state='provisioning', backend_state='pending', step=0)"
    )
    page = window.open(f"/runs/{run}/", width=360)
    items = page.locator("[data-checklist-items] li")
    expect(items).to_have_count(6)
    expect(items.nth(0)).to_contain_text("done after 1.0 s")
    expect(items.nth(1)).to_contain_text("done")
    expect(items.nth(2)).to_contain_text(re.compile(r"Image.*backend status: pending · \d"))
    expect(items.nth(4)).to_contain_text("0 of 2 training")
    window.fits(page, "checklist", 360, 1440, full=False)
