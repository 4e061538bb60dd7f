"""Pools with trouble, and orphaned jobs."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from archipelago import fleet_rows
from runs.models import OrphanJob, Replica, ReplicaPool, Run
from runs.queries import fleet_trouble
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


def pools(user: Any, chosen: JobFilter = ALL, **options: Any) -> list[dict[str, Any]]:
    return fleet_trouble.troubled_pools(user, chosen, now=timezone.now(), **options)[0]


def test_pools_that_are_blocked_the_worst_first(user: Any, run: Run) -> None:
    first, second = pools(user)
    assert set(first) == {field.name for field in dataclasses.fields(fleet_rows.PoolTrouble)}
    assert (first["backend"], first["state"]) == ("modal", "action_required")
    assert "quota of 2 GPUs" in first["message"]
    assert (first["run_name"], first["owner"]) == ("Five backends", "olga")
    assert (second["backend"], second["state"]) == ("kubernetes", "open")
    assert second["open_until"]


def test_a_pool_whose_replicas_wait_for_machines(user: Any, run: Run) -> None:
    since = timezone.now() - datetime.timedelta(minutes=20)
    Replica.objects.filter(run=run, pool__backend="sagemaker").update(
        state="provisioning", pending_cause="capacity", pending_since=since, state_reason="full"
    )
    row = next(row for row in pools(user) if row["backend"] == "sagemaker")
    assert (row["state"], row["waiting"], row["pending"]) == ("waiting", 2, ["capacity"])
    assert row["message"] == "full"
    assert row["since"] == since.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def test_a_normal_start_is_no_trouble(user: Any, run: Run) -> None:
    Replica.objects.filter(run=run, pool__backend="sagemaker").update(
        state="provisioning", pending_cause="starting"
    )
    assert "sagemaker" not in {row["backend"] for row in pools(user)}


def test_a_pool_that_waits_before_it_launches_again(user: Any, run: Run) -> None:
    """Without capacity nothing counts as a failure; the pool is retried a minute later."""
    until = timezone.now() + datetime.timedelta(seconds=50)
    ReplicaPool.objects.filter(run=run, backend="huggingface").update(
        open_until=until, last_error="no a10g is free"
    )
    row = next(row for row in pools(user) if row["backend"] == "huggingface")
    assert (row["state"], row["message"]) == ("waiting", "no a10g is free")
    assert row["open_until"]


def test_pools_of_ended_runs_and_of_other_filters_are_left_out(user: Any, run: Run) -> None:
    assert [row["backend"] for row in pools(user, JobFilter(backend="modal"))] == ["modal"]
    assert pools(user, JobFilter(owner="oscar")) == []
    assert pools(User.objects.create_user("nora")) == []
    Run.objects.update(state="failed")
    assert pools(user) == []


def test_more_pools_than_the_limit(user: Any, run: Run) -> None:
    shown, more = fleet_trouble.troubled_pools(user, ALL, now=timezone.now(), limit=1)
    assert (len(shown), more) == (1, True)
    assert len(fleet_trouble.troubled_pools(user, ALL, now=timezone.now(), limit=2)[0]) == 2


def test_orphans_have_their_bill_where_the_price_is_known(user: Any, run: Run) -> None:
    seed_spend.orphans(run)
    (unknown, known), more = fleet_trouble.orphan_rows(user, ALL)
    assert set(known) == {field.name for field in dataclasses.fields(fleet_rows.Orphan)}
    assert known["cost_usd"] == pytest.approx(8.0)
    assert (known["run"], known["run_name"]) == (str(run.pk), "Five backends")
    assert (unknown["cost_usd"], unknown["price_usd_h"], unknown["run"]) == (None, None, None)
    assert not more
    assert fleet_trouble.orphan_rows(user, JobFilter(backend="kubernetes")) == ([], False)
    assert fleet_trouble.orphan_rows(user, JobFilter(owner="olga"))[0] == [known]


def test_a_job_that_was_found_once_is_not_shown(user: Any, run: Run) -> None:
    seed_spend.orphans(run)
    for job in OrphanJob.objects.all():
        OrphanJob.objects.filter(pk=job.pk).update(seen_at=job.first_seen_at)
    assert fleet_trouble.orphan_rows(user, ALL) == ([], False)


def test_the_number_of_queries_is_constant(user: Any, run: Run) -> None:
    seed_spend.orphans(run)

    def queries() -> int:
        user.refresh_from_db()  # as in a new request, whose roles are not read yet
        with CaptureQueriesContext(connection) as captured:
            fleet_trouble.troubled_pools(user, ALL, now=timezone.now())
            fleet_trouble.orphan_rows(user, ALL)
        return len(captured)

    before = queries()
    seed_fleet.mixed(run.owner, name="one more")
    assert queries() == before
