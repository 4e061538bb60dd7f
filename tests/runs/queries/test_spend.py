"""Spending: costs spread over days, sums of groups, unknown prices, rate and forecast."""

from __future__ import annotations

import dataclasses
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext

from archipelago import fleet_rows
from runs.models import ReplicaAttempt, ReplicaPool, Run
from runs.queries import spend
from runs.queries.attempt_costs import Attempt, Period, by_day, stretches
from runs.queries.live_jobs import JobFilter
from runs.queries.spend_history import Stretch
from tests.browser import seed, seed_spend

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 10, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
WEEK = Period.until(NOW.date())
ALL = JobFilter()
BLANK = Attempt(
    run=UUID(int=1),
    backend="modal",
    price=2.0,
    cost=None,
    earlier=0.0,
    created_at=NOW - 10 * HOUR,
    launched_at=NOW - 10 * HOUR,
    started_at=None,
    ended_at=None,
)


def made(**changes: Any) -> Attempt:
    return dataclasses.replace(BLANK, **changes)


def at(hours: float) -> datetime:
    """Hours before now."""
    return NOW - hours * HOUR


def test_an_ended_job_cost_evenly_from_its_start_to_its_end() -> None:
    assert stretches(made(started_at=at(8), ended_at=at(3), cost=10.0), NOW) == [
        Stretch(start=at(8), end=at(3), usd=10.0)
    ]


def test_a_job_that_waits_or_never_started_cost_nothing() -> None:
    assert stretches(made(), NOW) == []
    assert stretches(made(ended_at=at(1), cost=0.0), NOW) == []
    assert stretches(made(price=None), NOW) == []


def test_a_running_job_cost_as_far_as_its_stored_cost() -> None:
    assert stretches(made(started_at=at(8), cost=6.0), NOW) == [
        Stretch(start=at(8), end=at(5), usd=6.0)
    ]


def test_the_cost_before_a_suspension_is_spread_over_the_time_before_the_last_start() -> None:
    assert stretches(made(started_at=at(2), cost=7.0, earlier=4.0, ended_at=at(1)), NOW) == [
        Stretch(start=at(10), end=at(2), usd=4.0),
        Stretch(start=at(2), end=at(1), usd=3.0),
    ]
    suspended = made(cost=4.0, earlier=4.0)
    assert stretches(suspended, NOW) == [Stretch(start=at(10), end=NOW, usd=4.0)]


def test_a_job_without_a_price_has_an_unknown_cost() -> None:
    assert stretches(made(price=None, started_at=at(8), ended_at=at(3)), NOW) == [
        Stretch(start=at(8), end=at(3), usd=None)
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -5.0, 1e308])
def test_numbers_that_no_price_has_are_bounded(bad: float) -> None:
    for changes in ({"price": bad}, {"cost": bad}, {"earlier": bad}):
        for stretch in stretches(made(**{"started_at": at(8), "cost": 1.0} | changes), NOW):
            assert stretch.start <= stretch.end <= NOW


def test_a_stretch_is_divided_by_days() -> None:
    stretch = Stretch(
        start=datetime(2026, 11, 8, 18, tzinfo=UTC),
        end=datetime(2026, 11, 10, 6, tzinfo=UTC),
        usd=1,
    )
    assert list(by_day(stretch, WEEK)) == [
        (date(2026, 11, 8), pytest.approx(6 / 36), 6 * 3600),
        (date(2026, 11, 9), pytest.approx(24 / 36), 24 * 3600),
        (date(2026, 11, 10), pytest.approx(6 / 36), 6 * 3600),
    ]
    short = Period(first=date(2026, 11, 9), last=date(2026, 11, 9))
    assert [day for day, _, _ in by_day(stretch, short)] == [date(2026, 11, 9)]
    moment = Stretch(start=NOW, end=NOW, usd=1.0)
    assert list(by_day(moment, WEEK)) == [(NOW.date(), 1.0, 0.0)]


def test_periods() -> None:
    today = NOW.date()
    assert WEEK.days[0] == date(2026, 11, 4)
    assert len(WEEK.days) == 7
    assert WEEK.problem(today=today) == ""
    assert "at most 366" in Period.until(today, days=367).problem(today=today)
    assert "up to" in Period(first=today, last=date(2026, 11, 9)).problem(today=today)
    assert "expected days" in Period.until(date(2026, 11, 11)).problem(today=today)
    assert "expected days" in Period.until(date(1999, 1, 9)).problem(today=today)


@pytest.fixture
def user() -> Any:
    return seed.user("vera", "viewer")


@pytest.fixture
def runs() -> list[Run]:
    """A priced run of olga and an unpriced one of oscar, each with one replica."""
    result = []
    for owner, backend, price, tags in (
        ("olga", "modal", 2.0, ["paper", "sweep"]),
        ("oscar", "kubernetes", None, []),
    ):
        run = seed.run(seed.user(owner, "operator"), name=f"of {owner}", replicas=1, committed=1)
        ReplicaPool.objects.filter(run=run).update(backend=backend, price_usd_h=price)
        Run.objects.filter(pk=run.pk).update(tags=tags)
        result.append(run)
    return result


def job(run: Run, number: int, start: datetime, end: datetime, price: float | None) -> Any:
    replica = run.replicas.select_related("pool").get()
    return seed_spend.attempt(replica, number=number, start=start, end=end, price=price)


def test_sums_by_day_backend_owner_run_and_tag(user: Any, runs: list[Run]) -> None:
    priced, unpriced = runs
    job(priced, 1, at(60), at(50), 2.0)
    job(priced, 2, at(14), at(10), 2.0)
    job(unpriced, 1, at(5), at(2), None)
    row = spend.spend(user, WEEK, ALL, now=NOW)
    assert set(row) == {field.name for field in dataclasses.fields(fleet_rows.Spend)}
    total = row["total"]
    assert (total["jobs"], total["usd"]) == (3, pytest.approx(28.0))
    assert (total["unpriced_jobs"], total["unpriced_s"]) == (1, 3 * 3600)
    days = {day["day"]: day for day in row["days"]}
    assert len(days) == 7
    assert days["2026-11-08"]["backends"] == {"modal": pytest.approx(20.0)}
    assert days["2026-11-09"]["usd"] == pytest.approx(4.0)
    assert days["2026-11-10"]["backends"] == {"modal": pytest.approx(4.0)}
    assert days["2026-11-10"]["unpriced_s"] == 3 * 3600
    assert days["2026-11-05"]["usd"] == 0.0
    assert [(g["key"], g["usd"]) for g in row["backends"]] == [
        ("modal", pytest.approx(28.0)),
        ("kubernetes", None),
    ]
    assert [g["key"] for g in row["owners"]] == ["olga", "oscar"]
    assert [(g["key"], g["label"]) for g in row["runs"]] == [
        (str(priced.pk), "of olga"),
        (str(unpriced.pk), "of oscar"),
    ]
    assert [(g["key"], g["usd"]) for g in row["tags"]] == [
        ("paper", pytest.approx(28.0)),
        ("sweep", pytest.approx(28.0)),
        ("", None),
    ]
    assert row["complete"]


def test_a_day_with_only_unknown_costs_is_unknown(user: Any, runs: list[Run]) -> None:
    job(runs[1], 1, at(5), at(2), None)
    row = spend.spend(user, WEEK, ALL, now=NOW)
    assert row["total"]["usd"] is None
    assert row["days"][-1]["usd"] is None
    assert row["month_usd"] is None
    assert row["forecast_usd"] is None


def test_the_parts_of_a_job_outside_of_the_period_are_left_out(user: Any, runs: list[Run]) -> None:
    job(runs[0], 1, datetime(2026, 11, 3, 12, tzinfo=UTC), datetime(2026, 11, 4, 12, tzinfo=UTC), 1)
    job(runs[0], 2, at(500), at(400), 1.0)
    row = spend.spend(user, WEEK, ALL, now=NOW)
    assert (row["total"]["jobs"], row["total"]["usd"]) == (1, pytest.approx(12.0))
    assert row["month_usd"] == pytest.approx(24.0)


def test_rate_and_forecast(user: Any, runs: list[Run]) -> None:
    job(runs[0], 1, at(14), at(4), 2.0)
    live = job(runs[0], 2, at(3), at(1), 2.0)
    ReplicaAttempt.objects.filter(pk=live.pk).update(ended_at=None)
    row = spend.spend(user, WEEK, ALL, now=NOW)
    assert row["now"]["usd_h"] == pytest.approx(2.0)
    assert row["month_usd"] == pytest.approx(24.0)
    left_h = (datetime(2026, 12, 1, tzinfo=UTC) - NOW) / HOUR
    assert row["forecast_usd"] == pytest.approx(24.0 + 2.0 * left_h)


def test_filters_and_roles(user: Any, runs: list[Run]) -> None:
    job(runs[0], 1, at(5), at(4), 2.0)
    job(runs[1], 1, at(5), at(2), 1.0)
    of_olga = spend.spend(user, WEEK, JobFilter(owner="olga"), now=NOW)
    assert of_olga["total"]["usd"] == pytest.approx(2.0)
    of_modal = spend.spend(user, WEEK, JobFilter(backend="modal"), now=NOW)
    assert [g["key"] for g in of_modal["backends"]] == ["modal"]
    nothing = spend.spend(User.objects.create_user("nora"), WEEK, ALL, now=NOW)
    assert nothing["total"]["jobs"] == 0


def test_the_rest_of_a_group_is_one_row(user: Any, runs: list[Run]) -> None:
    job(runs[0], 1, at(5), at(4), 2.0)
    job(runs[1], 1, at(5), at(2), 1.0)
    row = spend.spend(user, WEEK, ALL, now=NOW, limit=1)
    first, rest = row["runs"]
    assert (first["label"], rest["others"]) == ("of oscar", 1)
    assert rest["usd"] == pytest.approx(2.0)


def test_too_many_jobs_are_reported(
    user: Any, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 5):
        job(runs[0], number, at(5), at(4), 2.0)
    monkeypatch.setattr(spend, "MOST_ATTEMPTS", 3)
    row = spend.spend(user, WEEK, ALL, now=NOW)
    assert not row["complete"]
    assert row["total"]["jobs"] == 3


def test_the_number_of_queries_is_constant(user: Any, runs: list[Run]) -> None:
    def queries() -> int:
        user.refresh_from_db()  # as in a new request, whose roles are not read yet
        with CaptureQueriesContext(connection) as captured:
            spend.spend(user, WEEK, ALL, now=NOW)
        return len(captured)

    job(runs[0], 1, at(5), at(4), 2.0)
    before = queries()
    job(runs[1], 1, at(5), at(4), 2.0)
    for number in range(2, 9):
        job(runs[0], number, at(5), at(4), 2.0)
    assert queries() == before


def test_traffic_is_spread_over_the_run_and_is_no_job() -> None:
    run = seed.run(seed.user("olga", "operator"), name="Moved", replicas=1, committed=1)
    ReplicaAttempt.objects.all().delete()
    Run.objects.update(traffic_usd=10.0, started_at=at(24 * 10), ended_at=at(0), tags=["paper"])
    vera = seed.user("vera", "viewer")
    row = spend.spend(vera, WEEK, ALL, now=NOW)
    inside = (NOW - datetime(2026, 11, 4, tzinfo=UTC)) / timedelta(days=10)
    assert row["total"]["usd"] == pytest.approx(10 * inside)
    assert (row["total"]["jobs"], row["total"]["unpriced_jobs"]) == (0, 0)
    [backend] = row["backends"]
    assert (backend["key"], backend["label"]) == ("traffic", "Traffic and requests (estimate)")
    assert [row[name][0]["key"] for name in ("owners", "runs", "tags")] == [
        "olga",
        str(run.pk),
        "paper",
    ]
    assert row["month_usd"] == pytest.approx(9.5)
    assert spend.spend(vera, WEEK, JobFilter(backend="modal"), now=NOW)["total"]["usd"] == 0
    assert spend.spend(vera, WEEK, JobFilter(owner="oscar"), now=NOW)["total"]["usd"] == 0
