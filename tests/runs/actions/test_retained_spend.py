"""A deleted run and removed tags free no budget, and their cost stays on the page of spending."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client

from archipelago.fleet_rows import SpendGroup
from runs.actions import lifecycle, retained_spend
from runs.actions.deletion import delete_run
from runs.models import RetainedSpend, Run, Sweep, TagPeriod
from runs.queries import spend
from runs.queries.attempt_costs import Period
from runs.queries.budgets import Spending, spending_since
from runs.queries.live_jobs import JobFilter
from tests.browser import seed, seed_spend

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Names and arguments of the tasks that were queued."""
    tasks: list[tuple[str, str]] = []
    monkeypatch.setattr("runs.task_queue._send", lambda name, *a: tasks.append((name, *a)))
    return tasks


@pytest.fixture
def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
def run(now: datetime) -> Run:
    """An ended run that cost 30 dollars: 10 hours of $2, and 10 hours of $1."""
    made: Run = seed.run(seed.user("olga", "operator"), name="Costly", replicas=1, committed=1)
    made.pools.update(backend="modal")
    replica = made.replicas.select_related("pool").get()
    replica.attempts.all().delete()
    seed_spend.attempt(replica, number=1, start=now - 40 * HOUR, end=now - 30 * HOUR, price=2.0)
    seed_spend.attempt(replica, number=2, start=now - 20 * HOUR, end=now - 10 * HOUR, price=1.0)
    Run.objects.filter(pk=made.pk).update(
        state="failed", tags=["paper"], created_at=now - 41 * HOUR, cost_usd=30.0
    )
    made.refresh_from_db()
    return made


def spent(now: datetime) -> Spending:
    return spending_since((now - timedelta(days=3)).date(), now)


def row(now: datetime, chosen: JobFilter = JobFilter()) -> dict[str, Any]:  # noqa: B008
    period = Period.until(now.date())
    return spend.spend(seed.user("vera", "viewer"), period, chosen, now=now)


def without_marks(row: dict[str, Any]) -> Any:
    """The amounts of all tables, rounded."""
    return json.loads(
        json.dumps(
            {
                name: [
                    (group["key"], group["label"], group["jobs"], round(group["usd"], 6))
                    for group in row[name]
                ]
                for name in ("backends", "owners", "runs", "tags")
            }
            | {"days": [(day["day"], round(day["usd"], 6)) for day in row["days"]]}
            | {"total": (row["total"]["jobs"], round(row["total"]["usd"], 6))}
        )
    )


def by_page(run: Run) -> None:
    Client.force_login(client := Client(), run.owner)
    assert client.post(f"/runs/{run.pk}/delete", {"name": run.name}).status_code == 302


def by_bulk(run: Run) -> None:
    Client.force_login(client := Client(), run.owner)
    sent = {"do": "delete", "id": [str(run.pk)], "back": "", "confirmed": "1", "count": "1"}
    assert client.post("/runs/bulk", sent).status_code == 302


def by_api(run: Run) -> None:
    Client.force_login(client := Client(), run.owner)
    response = client.post(
        f"/api/runs/{run.pk}/delete", {"name": run.name}, content_type="application/json"
    )
    assert response.status_code == 200, response.content


@pytest.mark.parametrize("delete", [by_page, by_bulk, by_api])
def test_a_deleted_run_stays_in_budgets_and_spending(
    run: Run, now: datetime, delete: Callable[[Run], None], sent: list[tuple[str, str]]
) -> None:
    before = without_marks(row(now))
    assert before["total"] == [2, 30.0]
    delete(run)
    run.refresh_from_db()
    assert run.delete_requested_at is not None
    delete_run(str(run.pk))
    delete_run(str(run.pk))  # delivered twice
    assert not Run.objects.exists()
    assert spent(now).owners["olga"].usd == pytest.approx(30)
    assert spent(now).tags["paper"].usd == pytest.approx(30)
    after = row(now)
    assert without_marks(after) == before
    assert [group["deleted"] for group in after["runs"]] == [True]
    assert set(after["runs"][0]) == {field.name for field in dataclasses.fields(SpendGroup)}


def test_the_administration_deletes_no_run(run: Run) -> None:
    Client.force_login(client := Client(), seed.user("root", "admin"))
    assert client.post(f"/admin/runs/run/{run.pk}/delete/", {"post": "yes"}).status_code == 403
    actions = client.get("/admin/runs/run/").content.decode()
    assert "delete_selected" not in actions


def test_spending_of_deleted_runs_has_filters_and_a_mark(run: Run, now: datetime) -> None:
    retained_spend.retain(run, now=now)
    run.delete()
    assert row(now, JobFilter(owner="olga"))["total"]["usd"] == pytest.approx(30)
    assert row(now, JobFilter(owner="oscar"))["total"]["usd"] == 0
    assert row(now, JobFilter(backend="kubernetes"))["total"]["usd"] == 0
    Client.force_login(client := Client(), seed.user("vera", "viewer"))
    page = client.get("/spend").content.decode()
    assert ">Costly</span>" in page and ">deleted</i>" in page
    assert str(run.pk) not in page  # no link to a page that does not exist


def describe_by_page(run: Run, *tags: str) -> None:
    Client.force_login(client := Client(), run.owner)
    assert client.post(f"/runs/{run.pk}/describe", {"tags": " ".join(tags)}).status_code == 302


def describe_by_api(run: Run, *tags: str) -> None:
    Client.force_login(client := Client(), run.owner)
    sent = {"tags": list(tags)}
    response = client.post(f"/api/runs/{run.pk}/describe", sent, content_type="application/json")
    assert response.status_code == 200, response.content


def tag_in_bulk(run: Run, tag: str) -> None:
    Client.force_login(client := Client(), run.owner)
    client.post("/runs/bulk", {"do": "tag", "id": [str(run.pk)], "back": "", "tag": tag})


@pytest.mark.parametrize("describe", [describe_by_page, describe_by_api])
def test_a_removed_tag_keeps_what_was_spent(
    run: Run, now: datetime, describe: Callable[..., None]
) -> None:
    describe(run, "other")
    run.refresh_from_db()
    assert run.tags == ["other"]
    tags = spent(now).tags
    assert tags["paper"].usd == pytest.approx(30)
    assert "other" not in tags
    assert [(g["key"], g["jobs"]) for g in row(now)["tags"]] == [("paper", 2)]
    assert row(now)["total"]["jobs"] == 2


def test_an_added_tag_counts_from_then_on(run: Run, now: datetime) -> None:
    tag_in_bulk(run, "later")
    run.refresh_from_db()
    assert run.tags == ["paper", "later"]
    TagPeriod.objects.update(until=now - 15 * HOUR)
    tags = spent(now).tags
    assert tags["paper"].usd == pytest.approx(30)
    assert tags["later"].usd == pytest.approx(5)
    groups = {g["key"]: (g["usd"], g["jobs"]) for g in row(now)["tags"]}
    assert groups == {"paper": (pytest.approx(30), 2), "later": (pytest.approx(5), 1)}
    retained_spend.retain(run, now=now)
    run.delete()
    assert spent(now).tags["later"].usd == pytest.approx(5)


def test_changed_notes_start_no_period(run: Run) -> None:
    lifecycle.describe(run, notes="new", tags=run.tags, actor=run.owner)
    assert not TagPeriod.objects.exists()


def test_many_changes_of_tags_join_the_shortest_period(
    run: Run, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained_spend, "MOST_TAG_PERIODS", 2)
    for hours, tags in ((9, ["long"]), (4, ["short"]), (3, ["middle"]), (0, ["last"])):
        retained_spend.end_tags(run, now=now - hours * HOUR)
        Run.objects.filter(pk=run.pk).update(tags=tags)
        run.refresh_from_db()
    stored = TagPeriod.objects.values_list("tags", "until")
    assert list(stored) == [(["paper"], now - 9 * HOUR), (["long"], now - 4 * HOUR)]
    assert run.tags == ["last"]


def test_traffic_of_a_deleted_run_is_kept_without_a_job(run: Run, now: datetime) -> None:
    run.traffic_usd, run.started_at, run.ended_at = 4.0, now - 40 * HOUR, now - 10 * HOUR
    run.save()
    before = without_marks(row(now))
    retained_spend.retain(run, now=now)
    run.delete()
    assert without_marks(row(now)) == before
    assert spent(now).owners["olga"].usd == pytest.approx(34)


def test_an_unknown_price_stays_unknown(run: Run, now: datetime) -> None:
    replica = run.replicas.select_related("pool").get()
    replica.attempts.all().delete()
    seed_spend.attempt(replica, number=3, start=now - 40 * HOUR, end=now - 10 * HOUR, price=None)
    retained_spend.retain(run, now=now)
    run.delete()
    total = row(now)["total"]
    assert (total["usd"], total["jobs"], total["unpriced_jobs"]) == (None, 1, 1)
    assert total["unpriced_s"] == pytest.approx(30 * 3600)
    assert spent(now).owners["olga"].unpriced_jobs == 1


def test_a_run_that_is_imported_again_counts_once(run: Run, now: datetime) -> None:
    retained_spend.retain(run, now=now)  # the run exists, as after an import
    assert spent(now).owners["olga"].usd == pytest.approx(30)
    assert row(now)["total"]["usd"] == pytest.approx(30)
    replica = run.replicas.select_related("pool").get()
    seed_spend.attempt(replica, number=9, start=now, end=now + HOUR, price=2.0)
    assert spent(now + HOUR).owners["olga"].usd == pytest.approx(32)


def test_a_sweep_keeps_the_cost_of_deleted_runs(run: Run, now: datetime) -> None:
    run.sweep = Sweep.objects.create(
        name="s", owner=run.owner, parameters=[], metric="eval_loss", submit_key="s", created_at=now
    )
    run.save()
    retained_spend.retain(run, now=now)
    run.delete()
    assert Sweep.objects.get().deleted_usd == 30


def test_rows_are_few_and_named(run: Run, now: datetime) -> None:
    retained_spend.retain(run, now=now)
    rows = RetainedSpend.objects.all()
    assert 2 <= len(rows) <= 3  # one for each day and backend
    assert {(r.run, r.run_name, r.owner, r.backend) for r in rows} == {
        (run.pk, "Costly", "olga", "modal")
    }


def test_the_command_line_marks_deleted_runs(
    run: Run, now: datetime, capsys: pytest.CaptureFixture[str]
) -> None:
    from archipelago import fleet_commands
    from archipelago.fleet_rows import Spend

    retained_spend.retain(run, now=now)
    run.delete()
    fleet_commands._print_groups(Spend.of(row(now)), "run")
    assert "Costly (deleted)" in capsys.readouterr().out
