"""Budgets of owners and tags: what was spent, alerts, and the launches that they refuse."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from runs.actions import budgets as actions
from runs.backends import budgets
from runs.exceptions import ActionRefused, InvalidRun
from runs.models import Alert, Budget, ReplicaAttempt, Run, Webhook, WebhookDelivery
from runs.queries.budgets import budget_rows, spending_since
from runs.reconcile.budgets import evaluate_budgets
from tests.browser import seed

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 11, 19, 12, 0, tzinfo=UTC)  # a Thursday
MONDAY = date(2026, 11, 16)


@pytest.fixture(autouse=True)
def _no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runs.task_queue._send", lambda *_: None)


@pytest.fixture
def run() -> Run:
    made = seed.run(seed.user("olga", "operator"), name="Islands", replicas=2, committed=1)
    Run.objects.update(tags=["paper"])
    ReplicaAttempt.objects.all().delete()
    made.refresh_from_db()
    return made


def job(
    run: Run, *, start: datetime, end: datetime | None, usd: float | None, number: int = 1
) -> None:
    replica = run.replicas.order_by("number").first()
    assert replica is not None
    hours = ((end or NOW) - start).total_seconds() / 3600
    ReplicaAttempt.objects.create(
        replica=replica,
        number=number,
        launch_key=f"{run.pk.hex[:12]}-{number}",
        created_at=start,
        launched_at=start,
        started_at=start,
        ended_at=end,
        price_usd_h=None if usd is None else usd / hours,
        cost_usd=usd,
    )


def budget(
    amount: float = 100, *, period: str = "week", scope: str = "owner", name: str = "olga"
) -> Budget:
    return actions.save_budget(
        scope=scope, name=name, period=period, amount_usd=amount, actor=seed.user("root", "admin")
    )


def day(number: int, hour: int = 0) -> datetime:
    return datetime(2026, 11, number, hour, tzinfo=UTC)


@pytest.mark.parametrize(
    ("period", "first", "following"),
    [
        ("day", date(2026, 11, 19), date(2026, 11, 20)),
        ("week", MONDAY, date(2026, 11, 23)),
        ("month", date(2026, 11, 1), date(2026, 12, 1)),
    ],
)
def test_periods(period: str, first: date, following: date) -> None:
    assert budgets.first_day(period, NOW.date()) == first
    assert budgets.next_day(period, NOW.date()) == following


def test_a_job_counts_with_its_share_of_the_period(run: Run) -> None:
    job(run, start=day(15), end=day(17), usd=20)  # half of it before Monday
    job(run, start=day(17), end=day(18), usd=5, number=2)
    job(run, start=day(18), end=None, usd=None, number=3)
    job(run, start=day(1), end=day(2), usd=50, number=4)
    week = spending_since(MONDAY, NOW)
    assert week.owners["olga"].usd == pytest.approx(15)
    assert week.tags["paper"].usd == pytest.approx(15)
    assert week.owners["olga"].unpriced_jobs == 1
    assert spending_since(date(2026, 11, 1), NOW).owners["olga"].usd == pytest.approx(75)


def test_traffic_counts_with_its_share(run: Run) -> None:
    Run.objects.update(traffic_usd=8.0, started_at=day(15), ended_at=day(17))
    assert spending_since(MONDAY, NOW).owners["olga"].usd == pytest.approx(4)


def test_a_warning_comes_before_the_stop_and_both_end_with_the_period(run: Run) -> None:
    budget(100)
    job(run, start=day(17), end=day(18), usd=85)
    evaluate_budgets(NOW)
    [alert] = Alert.objects.filter(closed_at=None)
    assert (alert.kind, alert.level, alert.run) == ("shared_budget", "warning", None)
    assert "$85.00 of $100.00 a week, 85%" in alert.message
    assert budgets.refusal_of(run, NOW) == ""
    job(run, start=day(18), end=day(19), usd=20, number=2)
    evaluate_budgets(NOW)
    [alert] = Alert.objects.filter(closed_at=None)
    assert (alert.level, "nothing is launched before 2026-11-23" in alert.message) == (
        "error",
        True,
    )
    refusal = budgets.refusal_of(run, NOW)
    assert "the budget of owner olga is spent: $105.00 of $100.00 a week" in refusal
    assert "Launches resume on 2026-11-23" in refusal
    following = NOW + timedelta(days=7)
    assert budgets.refusal_of(run, following) == ""  # before it is evaluated again
    evaluate_budgets(following)
    assert not Alert.objects.filter(closed_at=None).exists()


def test_an_open_alert_names_the_changed_budget(run: Run) -> None:
    row = budget(100)
    job(run, start=day(17), end=day(18), usd=85)
    evaluate_budgets(NOW)
    acknowledged = {"acknowledged_at": NOW, "acknowledged_by": run.owner}
    Alert.objects.update(**acknowledged)
    Budget.objects.filter(pk=row.pk).update(amount_usd=90)
    evaluate_budgets(NOW + timedelta(minutes=1))
    [alert] = Alert.objects.all()
    assert "$85.00 of $90.00 a week, 94%" in alert.message
    assert (alert.opened_at, alert.times, alert.acknowledged_at) == (NOW, 1, NOW)
    job(run, start=day(18), end=day(19), usd=1, number=2)
    evaluate_budgets(NOW + timedelta(minutes=2))
    alert.refresh_from_db()
    assert "$85.00" in alert.message  # spending alone changes nothing


def test_a_budget_of_a_tag_applies_to_runs_with_it(run: Run) -> None:
    budget(10, scope="tag", name="paper")
    job(run, start=day(17), end=day(18), usd=85)
    evaluate_budgets(NOW)
    assert "the budget of tag paper is spent" in budgets.refusal_of(run, NOW)
    run.tags = ["other"]
    assert budgets.refusal_of(run, NOW) == ""


def test_webhooks_receive_the_alert_once(run: Run) -> None:
    Webhook.objects.create(
        name="Chat", url="http://127.0.0.1/", kinds=["shared_budget"], sealed="", created_at=NOW
    )
    budget(10)
    job(run, start=day(17), end=day(18), usd=85)
    evaluate_budgets(NOW)
    evaluate_budgets(NOW + timedelta(seconds=20))
    delivery = WebhookDelivery.objects.get()
    assert '"type": "shared_budget"' in delivery.body and '"run": null' in delivery.body


def test_a_deleted_budget_closes_its_alert(run: Run) -> None:
    made = budget(10)
    job(run, start=day(17), end=day(18), usd=85)
    evaluate_budgets(NOW)
    actions.delete_budget(made, actor=seed.user("root", "admin"))
    evaluate_budgets(NOW)
    assert not Alert.objects.filter(closed_at=None).exists()


def test_rows_show_the_nearest_to_its_amount_first(run: Run) -> None:
    budget(1000)
    budget(10, scope="tag", name="paper")
    job(run, start=day(17), end=day(18), usd=85)
    evaluate_budgets(NOW)
    rows = budget_rows(seed.user("vera", "viewer"), now=NOW)
    assert [(row["scope"], row["state"]) for row in rows] == [("tag", "exceeded"), ("owner", "ok")]
    assert rows[1]["share"] == pytest.approx(0.085)


@pytest.fixture
def spent(run: Run) -> Run:
    """A run whose owner has nothing left."""
    from django.utils import timezone

    budget(0, period="month")
    evaluate_budgets(timezone.now())
    return run


def test_new_runs_and_relaunches_are_refused_with_the_reason(spent: Run) -> None:
    from runs.actions import lifecycle, replicas_and_pools
    from runs.submit.create import check_budgets

    with pytest.raises(InvalidRun, match="the budget of owner olga is spent"):
        check_budgets(spent.owner, [])
    replica = spent.replicas.select_related("pool", "run").first()
    assert replica is not None
    with pytest.raises(ActionRefused, match="an administrator raises the budget"):
        replicas_and_pools.restart_replica(replica, actor=spent.owner)
    pool = spent.pools.get()
    with pytest.raises(InvalidRun, match="the budget of owner olga is spent"):
        replicas_and_pools.scale_pool(pool, pool.count + 1, actor=spent.owner)
    Run.objects.update(state="failed")
    spent.refresh_from_db()
    with pytest.raises(ActionRefused, match="the budget of owner olga is spent"):
        lifecycle.resume(spent, actor=spent.owner)


def test_the_budget_of_a_tag_refuses_a_submission_with_the_tag(run: Run) -> None:
    from django.utils import timezone

    from runs.queries.budgets import rows_of_owner
    from runs.submit.create import check_submission
    from runs.submit.run_draft import local_demo

    budget(0, period="month", scope="tag", name="paper")
    evaluate_budgets(timezone.now())
    check_submission(local_demo(), run.owner)
    assert rows_of_owner(run.owner, now=timezone.now()) == []
    [row] = rows_of_owner(run.owner, now=timezone.now(), tags=["paper"])
    assert (row["name"], row["state"]) == ("paper", "exceeded")
    with pytest.raises(InvalidRun, match="the budget of tag paper is spent"):
        check_submission(replace(local_demo(), tags=(" paper ",)), run.owner)


def test_a_changed_budget_stays_spent_until_it_is_evaluated(spent: Run) -> None:
    from runs.submit.create import check_budgets

    Budget.objects.update(amount_usd=10.0, spent_usd=20.0)
    [row] = Budget.objects.all()
    values = {"scope": row.scope, "name": row.name, "period": row.period}
    actions.save_budget(**values, amount_usd=5.0, actor=seed.user("root", "admin"), budget=row)
    with pytest.raises(InvalidRun, match="the budget of owner olga is spent"):
        check_budgets(spent.owner, [])


def test_the_launch_holds_a_pool_and_releases_it(spent: Run) -> None:
    from runs.backends import prices
    from runs.queries.fleet import breaker_row

    pool = spent.pools.get()
    refusal = budgets.refusal_of(spent, datetime.now(UTC))
    assert not prices.can_launch(pool, budget=refusal)
    pool.refresh_from_db()
    assert (pool.held_by, pool.held) == ("budget", refusal)
    assert breaker_row(pool)["state"] == "budget"
    assert not prices.can_launch(pool, budget=refusal + " and more")
    assert spent.events.filter(message__contains="nothing is launched").count() == 1
    assert prices.can_launch(pool)
    pool.refresh_from_db()
    assert (pool.held_by, pool.held) == ("", "")
    assert spent.events.filter(message__contains="the budget is within the limit").exists()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"amount_usd": float("nan")}, "amount_usd"),
        ({"amount_usd": -1.0}, "amount_usd"),
        ({"amount_usd": 5e-324}, "amount_usd"),
        ({"warn_at": 0.0}, "warn_at"),
        ({"period": "year"}, "period"),
        ({"scope": "team"}, "scope"),
        ({"name": "nora"}, "name"),
        ({"scope": "tag", "name": "x" * 41}, "name"),
        ({"scope": "tag", "name": " "}, "name"),
        ({"scope": "tag", "name": "team a"}, "name"),
        ({"scope": "tag", "name": "team:a"}, "name"),
    ],
)
def test_a_bad_budget_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    seed.user("olga", "operator")
    values = {"scope": "owner", "name": "olga", "period": "day", "amount_usd": 1.0, **change}
    with pytest.raises(InvalidRun) as refused:
        actions.save_budget(**values, actor=seed.user("root", "admin"))
    assert refused.value.field == field
    assert not Budget.objects.exists()
