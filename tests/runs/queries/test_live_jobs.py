"""Live jobs of all runs: rows, pages, sums and filters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext

from archipelago import fleet_rows
from runs.models import ReplicaAttempt, Run
from runs.queries import live_jobs
from runs.queries.live_jobs import JobFilter
from tests.browser import seed, seed_fleet, seed_spend

pytestmark = pytest.mark.django_db
ALL = JobFilter()


@pytest.fixture
def user() -> Any:
    return seed.user("vera", "viewer")


@pytest.fixture
def run() -> Run:
    made = seed_fleet.mixed(seed.user("olga", "operator"))
    assert isinstance(made, Run)
    return made


def rows(user: Any, chosen: JobFilter = ALL, **options: Any) -> list[dict[str, Any]]:
    return live_jobs.page(live_jobs.live_jobs(user), chosen, **options)[0]


def test_a_row_has_run_machine_price_and_link(user: Any, run: Run) -> None:
    attempt = ReplicaAttempt.objects.get(ended_at=None, replica__number=2)
    attempt.handle["data"] = {"id": "sb-1"}
    attempt.save()
    row = next(row for row in rows(user) if row["replica"] == 2)
    assert set(row) == {field.name for field in dataclasses.fields(fleet_rows.LiveJob)}
    assert (row["run"], row["run_name"], row["owner"]) == (str(run.pk), "Five backends", "olga")
    assert (row["hardware"], row["region"], row["price_usd_h"]) == ("H100", "us-east", 3.95)
    assert row["url"].endswith("/sb-1")
    assert row["started_at"].endswith("Z")


def test_only_jobs_that_have_not_ended_are_live(user: Any, run: Run) -> None:
    assert len(rows(user)) == 10 < ReplicaAttempt.objects.count()
    ReplicaAttempt.objects.filter(ended_at=None).update(ended_at=run.created_at)
    assert rows(user) == []


def test_a_user_without_a_role_sees_none(run: Run) -> None:
    assert rows(User.objects.create_user("nora")) == []


def test_pages_have_every_job_once(user: Any, run: Run) -> None:
    seen, before = [], ""
    for _ in range(4):
        page, before = live_jobs.page(live_jobs.live_jobs(user), ALL, before=before, limit=3)
        seen += [row["replica"] for row in page]
    assert seen == list(range(9, -1, -1))
    assert before == ""
    assert len(rows(user, before="no position")) == 10


def test_filters(user: Any, run: Run) -> None:
    other = seed.run(seed.user("oscar", "operator"), replicas=1, committed=1)
    seed_spend.history(other, days=1, price=1.0, backend="modal", tags=[])
    assert {row["backend"] for row in rows(user, JobFilter(backend="modal"))} == {"modal"}
    assert {row["owner"] for row in rows(user, JobFilter(owner="oscar"))} == {"oscar"}
    assert {row["state"] for row in rows(user, JobFilter(state="restarting"))} == {"restarting"}
    assert rows(user, JobFilter(owner="oscar", backend="local")) == []


def test_sums_count_started_jobs_with_a_price(user: Any, run: Run) -> None:
    waiting = ReplicaAttempt.objects.get(ended_at=None, replica__number=2)
    ReplicaAttempt.objects.filter(pk=waiting.pk).update(started_at=None)
    counted = live_jobs.counts(live_jobs.live_jobs(user))
    sums = {row["backend"]: row for row in live_jobs.by_backend(counted, ALL)}
    assert next(iter(sums)) == "local"
    modal = sums["modal"]
    assert (modal["jobs"], modal["running"], modal["unpriced"]) == (3, 2, 0)
    assert modal["usd_h"] == pytest.approx(2 * 3.95)
    unknown = sums["sagemaker"]
    assert (unknown["usd_h"], unknown["unpriced"]) == (None, 2)
    total = live_jobs.matching_total(counted, ALL)
    assert (total["jobs"], total["running"], total["unpriced"]) == (10, 9, 2)
    assert total["usd_h"] == pytest.approx(2 * 3.95 + 2 * 1.5 + 0.8)


def test_sums_of_backends_leave_out_the_filter_for_a_backend(user: Any, run: Run) -> None:
    counted = live_jobs.counts(live_jobs.live_jobs(user))
    chosen = JobFilter(backend="modal")
    assert len(live_jobs.by_backend(counted, chosen)) == 5
    assert live_jobs.matching_total(counted, chosen)["jobs"] == 3
    assert dict(live_jobs.choices(counted, chosen, "owner")) == {"olga": 3}
    gone = JobFilter(backend="nowhere")
    assert {"backend": "nowhere", "jobs": 0}.items() <= live_jobs.by_backend(counted, gone)[
        -1
    ].items()


def test_the_number_of_queries_is_constant(user: Any, run: Run) -> None:
    def queries() -> int:
        user.refresh_from_db()  # as in a new request, whose roles are not read yet
        with CaptureQueriesContext(connection) as captured:
            jobs = live_jobs.live_jobs(user)
            live_jobs.counts(jobs)
            live_jobs.page(jobs, ALL)
        return len(captured)

    before = queries()
    for n in range(3):
        more = seed.run(run.owner, name=f"more {n}", replicas=4, committed=1)
        seed_spend.history(more, days=1, price=1.0, backend="modal", tags=[])
    assert queries() == before


def test_the_pages_use_the_index_of_open_attempts(user: Any) -> None:
    if connection.vendor != "sqlite":
        pytest.skip("PostgreSQL plans by the number of rows")
    jobs = live_jobs.live_jobs(user)
    with CaptureQueriesContext(connection) as captured:
        live_jobs.page(jobs, ALL, before="5_9")
    sql = captured[-1]["sql"]
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
        plan = " ".join(str(row[-1]) for row in cursor.fetchall())
    assert "attempt_open" in plan
