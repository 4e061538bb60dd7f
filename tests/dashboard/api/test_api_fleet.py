"""The fleet and spending through the API."""

from __future__ import annotations

import datetime
import json
import uuid
from typing import Any

import pytest
from django.utils import timezone

from archipelago import fleet_rows
from runs.models import RetainedSpend, Run
from runs.queries import spend
from tests.browser import seed, seed_fleet, seed_spend

pytestmark = pytest.mark.django_db


@pytest.fixture
def mixed() -> Run:
    made = seed_fleet.mixed(seed.user("olga", "operator"))
    seed_spend.orphans(made)
    assert isinstance(made, Run)
    return made


def test_the_fleet(owner: Any, mixed: Run) -> None:
    response = owner.get("/fleet")
    assert response.status_code == 200
    page = fleet_rows.FleetPage.of(response.json())
    assert len(page.jobs) == 10
    assert page.next is None
    assert page.total.jobs == 10
    assert [row.backend for row in page.backends][:2] == ["local", "modal"]
    assert {pool.state for pool in page.pools} == {"action_required", "open"}
    assert [job.cost_usd for job in page.orphans] == [None, pytest.approx(8.0)]


def test_filters_and_pages(owner: Any, mixed: Run) -> None:
    seen, before = [], {}
    while True:
        body = owner.get("/fleet", owner="olga", limit=4, **before).json()
        seen += [job["replica"] for job in body["jobs"]]
        if body["next"] is None:
            break
        before = {"before": body["next"]}
    assert seen == list(range(9, -1, -1))
    assert len(owner.get("/fleet", backend="modal").json()["jobs"]) == 3
    assert owner.get("/fleet", state="nothing").json()["jobs"] == []


@pytest.mark.parametrize(
    "query", [{"before": "x"}, {"limit": 0}, {"limit": 501}, {"state": "\x00"}]
)
def test_wrong_parameters_of_the_fleet(owner: Any, query: dict[str, Any]) -> None:
    assert owner.get("/fleet", **query).status_code == 422


def test_spending(owner: Any) -> None:
    run = seed.run(seed.user("owner", "operator"), name="Priced", replicas=2, committed=1)
    seed_spend.history(run, days=3, price=2.0, backend="modal", tags=["paper"])
    body = owner.get("/spend").json()
    row = fleet_rows.Spend.of(body)
    assert len(row.days) == 7
    assert row.total.usd == pytest.approx(sum(day.usd or 0 for day in row.days))
    assert [(group.key, group.label) for group in row.runs] == [(str(run.pk), "Priced")]
    assert row.now.usd_h == pytest.approx(4.0)
    assert row.tags[0].key == "paper"
    today = datetime.datetime.now(datetime.UTC).date()
    one = owner.get("/spend", **{"from": str(today), "to": str(today)}).json()
    assert [day["day"] for day in one["days"]] == [str(today)]
    assert len(owner.get("/spend", days=30).json()["days"]) == 30


def test_spending_as_a_file(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = seed.run(seed.user("owner", "operator"), name="=1+1", replicas=2, committed=1)
    seed_spend.history(run, days=3, price=2.0, backend="modal", tags=["paper"])
    other = seed.run(seed.user("oscar", "operator"), name="Unpriced", replicas=1, committed=1)
    seed_spend.history(other, days=1, price=None, backend="kubernetes", tags=[])
    today = timezone.now().date()
    RetainedSpend.objects.bulk_create(
        RetainedSpend(
            run=uuid.uuid4(),
            run_name="Gone",
            owner=f"u{n}",
            backend="modal",
            day=today,
            deleted_at=timezone.now(),
        )
        for n in range(spend.GROUPS)
    )
    rows = [json.loads(line) for line in lines_of(owner.get("/spend.jsonl"))]
    usd = {(row["by"], row["name"]): row["usd"] for row in rows}
    assert usd["run", "=1+1"] == usd["backend", "Modal"] > 0
    assert sum(row["by"] == "owner" for row in rows) == spend.GROUPS + 2  # none is summed up
    assert (usd["owner", "oscar"], usd["run", "Unpriced"]) == (None, None)
    assert sum(row["by"] == "day" for row in rows) == 7
    assert {row["key"] for row in rows if row["by"] == "run"} >= {str(run.pk), str(other.pk)}
    (line,) = [row for row in lines_of(owner.get("/spend.csv")) if row.startswith("run,")][:1]
    assert "'=1+1" in line
    assert owner.get("/spend.csv", days=0).status_code == 422
    assert owner.get("/spend.csv", **{"from": "2026-01-02", "to": "2026-01-01"}).status_code == 422
    monkeypatch.setattr(spend, "MOST_ATTEMPTS", 1)
    refused = owner.get("/spend.csv")
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["message"].startswith("expected a period of at most 1 job")


def lines_of(response: Any) -> list[str]:
    return b"".join(response.streaming_content).decode().splitlines()


@pytest.mark.parametrize(
    "query",
    [
        {"days": 0},
        {"days": 367},
        {"from": "2019-01-01"},
        {"from": "soon"},
        {"to": "9999-12-31"},
        {"to": "0001-01-01"},
        {"limit": 0},
    ],
)
def test_wrong_parameters_of_spending(owner: Any, query: dict[str, Any]) -> None:
    response = owner.get("/spend", **query)
    assert response.status_code == 422
    assert response.json()["errors"]


@pytest.mark.parametrize("text", ["x", "2026-02-30", "2026-01-31T01:00", ""])
def test_a_wrong_day_is_named(owner: Any, text: str) -> None:
    detail = owner.get("/spend", **{"from": text}).json()["detail"]
    assert detail == f"from: expected a day such as 2026-01-31, found {text!r}"
