"""The fleet page: content, filters, pages, and limits."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from runs.models import OrphanJob, ReplicaAttempt, ReplicaPool, Run
from runs.queries import live_jobs
from tests.browser import seed, seed_fleet, seed_spend
from tests.dashboard.page_harness import client_for

pytestmark = pytest.mark.django_db
HOSTILE = "<script>alert(1)</script>\"'"


@pytest.fixture
def run() -> Run:
    made = seed_fleet.mixed(seed.user("olga", "operator"))
    assert isinstance(made, Run)
    return made


@pytest.fixture
def viewer(run: Run) -> Client:
    return client_for("viewer", run.owner)


def page(client: Client, query: str = "", status: int = 200) -> str:
    response = client.get(f"/fleet{query}")
    assert response.status_code == status
    return response.content.decode()


def jobs_in(html: str) -> int:
    return html.count("data-job>")


def test_jobs_sums_trouble_and_orphans_without_a_script(viewer: Client, run: Run) -> None:
    seed_spend.orphans(run)
    html = page(viewer)
    assert jobs_in(html) == 10
    assert f'href="{reverse("replica", args=[run.pk, 3])}"' in html
    text = re.sub(r"<[^>]+>|\s+", " ", html)
    for part in ("Action required", "quota of 2 GPUs", "eu-central-1", "$3.95/h", "unknown"):
        assert part in text
    assert "no attempt has its launch key" in text
    assert "$8.00" in text
    assert "+ 2 without a price" in text


def test_the_fragment_has_no_frame(viewer: Client) -> None:
    html = page(viewer, "?part=1")
    assert jobs_in(html) == 10
    assert "<html" not in html


def test_filters_are_in_the_address(viewer: Client) -> None:
    html = page(viewer, "?backend=modal&owner=olga")
    assert jobs_in(html) == 3
    assert '<option value="modal" selected>' in html
    assert "?backend=kubernetes&amp;owner=olga" in html
    assert jobs_in(page(viewer, "?state=restarting")) == 1
    nothing = page(viewer, "?owner=nora")
    assert "No job matches the filters" in nothing
    assert '<option value="nora" selected>' in nothing


def test_pages(viewer: Client, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_jobs.page, "__kwdefaults__", {"before": "", "limit": 4})
    html = page(viewer, "?owner=olga")
    assert jobs_in(html) == 4
    following = re.search(r'href="(\?owner=olga[^"]*before=[^"]+)" rel="next"', html)
    assert following
    html = page(viewer, following[1].replace("&amp;", "&"))
    assert jobs_in(html) == 4
    assert 'href="?owner=olga">' in html
    assert jobs_in(page(viewer, "?before=1_1")) == 0


def test_an_empty_fleet(client: Client) -> None:
    client.force_login(seed.user("vera", "viewer"))
    html = page(client)
    assert "No job is running or waiting" in html
    assert "No pool is blocked" in html
    assert "Orphaned jobs" not in html


def test_text_of_others_is_escaped_and_bounded(viewer: Client, run: Run) -> None:
    seed_spend.orphans(run)
    Run.objects.update(name=HOSTILE[:80])
    ReplicaPool.objects.update(
        backend=HOSTILE[:32], region=HOSTILE, hardware=HOSTILE, last_error=HOSTILE * 5000
    )
    OrphanJob.objects.update(launch_key=HOSTILE, reason=HOSTILE, backend=HOSTILE[:32])
    ReplicaAttempt.objects.update(handle=["no", "mapping"], price_usd_h=1e300)
    for query in ("", f"?backend={HOSTILE}&owner={HOSTILE}&state={HOSTILE}"):
        html = page(viewer, query)
        assert "<script>alert" not in html
        assert len(html) < 300_000


def test_the_number_of_queries_does_not_grow(viewer: Client, run: Run) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            page(viewer)
        return len(captured)

    before = queries()
    for n in range(4):
        seed_fleet.mixed(run.owner, name=f"more {n}")
    assert queries() == before


def test_every_page_links_to_the_fleet_and_to_spending(viewer: Client) -> None:
    html = viewer.get("/").content.decode()
    assert 'href="/fleet"' in html
    assert 'href="/spend"' in html


def test_an_unknown_cost_of_a_row_is_not_zero(viewer: Client, run: Run) -> None:
    html = page(viewer, "?backend=sagemaker&part=1")
    row = html.split("data-job>")[1]
    assert row.count("unknown") == 2
    assert "$0.00" not in row
