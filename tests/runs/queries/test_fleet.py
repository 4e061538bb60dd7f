"""Pools, replicas and attempts as rows."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from django.utils import timezone

from runs.models import Credential, Replica, ReplicaAttempt, ReplicaPool, Run
from runs.queries import fleet, selectors
from tests.browser import seed, seed_fleet

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Run:
    made = seed_fleet.mixed(seed.user("olga", "operator"))
    assert isinstance(made, Run)
    return made


def by_backend(run: Run) -> dict[str, dict[str, Any]]:
    return {row["backend"]: row for row in fleet.pool_rows(run)}


def test_pool_row_has_location_counts_and_price(run: Run) -> None:
    rows = by_backend(run)
    modal = rows["modal"]
    assert (modal["name"], modal["region"], modal["spot"]) == ("Modal H100", "us-east", False)
    assert (modal["live"], modal["wanted"]) == (3, 3)
    assert modal["price_usd_h"] == 3.95
    assert rows["local"]["name"] == "CPU of this machine"
    assert rows["sagemaker"]["spot"] is True


def test_costs_add_up_by_pool_replica_and_attempt(run: Run) -> None:
    modal = ReplicaPool.objects.get(run=run, backend="modal")
    of_replicas = {
        r["number"]: r["cost_usd"] for r in fleet.replica_rows(run) if r["pool"] == modal.pk
    }
    for number, cost in of_replicas.items():
        replica = Replica.objects.get(run=run, number=number)
        attempts = fleet.attempt_rows(replica)
        assert cost == pytest.approx(sum(a["cost_usd"] for a in attempts))
    assert by_backend(run)["modal"]["cost_usd"] == pytest.approx(sum(of_replicas.values()))


def test_row_has_the_end_of_the_newest_ended_attempt(run: Run) -> None:
    rows = {r["number"]: r for r in fleet.replica_rows(run)}
    assert [rows[n]["last_cause"] for n in range(4)] == ["", "preempted", "out_of_memory", "error"]
    ended = ReplicaAttempt.objects.get(replica__run=run, replica__number=2, number=2).ended_at
    assert ended is not None
    assert datetime.datetime.fromisoformat(rows[2]["last_ended_at"]).replace(
        microsecond=0
    ) == ended.replace(microsecond=0)
    assert rows[0]["last_ended_at"] is None
    replica = Replica.objects.select_related("pool").get(run=run, number=3)
    assert fleet.replica_row(replica) == rows[3]


def test_unknown_price_is_null(run: Run) -> None:
    row = by_backend(run)["sagemaker"]
    assert (row["price_usd_h"], row["cost_usd"], row["cost_known"]) == (None, None, False)
    assert selectors.run_header(run)["cost_known"] is False
    local = by_backend(run)["local"]
    assert (local["cost_usd"], local["cost_known"]) == (0.0, True)


def test_partly_known_cost(run: Run) -> None:
    replica = run.replicas.filter(pool__backend="sagemaker").first()
    assert replica is not None
    ReplicaAttempt.objects.filter(replica=replica, number=1).update(price_usd_h=2.0, cost_usd=1.5)
    [row] = [r for r in fleet.replica_rows(run) if r["number"] == replica.number]
    assert (row["cost_usd"], row["cost_known"]) == (1.5, False)


def test_pool_without_launches_costs_zero(run: Run) -> None:
    ReplicaAttempt.objects.all().delete()
    assert {r["cost_usd"] for r in fleet.replica_rows(run)} == {0.0}
    assert {r["attempt"] for r in fleet.replica_rows(run)} == {0}


def test_deadline_is_that_of_the_running_attempt(run: Run) -> None:
    replica = run.replicas.get(number=3)
    [row] = [r for r in fleet.replica_rows(run) if r["number"] == 3]
    newest = replica.attempts.order_by("-number").first()
    assert newest is not None
    assert row["attempt"] == newest.number == 4
    assert newest.deadline_at is not None
    assert datetime.datetime.fromisoformat(row["deadline_at"]) == newest.deadline_at.replace(
        microsecond=newest.deadline_at.microsecond // 1000 * 1000
    )
    replica.attempts.update(ended_at=timezone.now())
    [row] = [r for r in fleet.replica_rows(run) if r["number"] == 3]
    assert row["deadline_at"] is None


def test_attempts_are_newest_first_with_all_fields(run: Run) -> None:
    rows = fleet.attempt_rows(run.replicas.get(number=3))
    assert [row["number"] for row in rows] == [4, 3, 2, 1]
    assert [row["cause"] for row in rows] == ["", "error", "out_of_memory", "preempted"]
    assert rows[2]["exit_code"] == 137
    assert rows[2]["message"].startswith("OOMKilled")
    assert rows[0]["ended_at"] is None
    assert rows[0]["job"] == {"job_id": "modal-7f3c00040003"}


# The breaker.


def pool_of(run: Run, **fields: Any) -> dict[str, Any]:
    ReplicaPool.objects.filter(run=run, backend="modal").update(
        **{"requires_intervention": False, "failures": 0, "open_until": None, "last_error": ""}
        | fields
    )
    breaker: dict[str, Any] = by_backend(run)["modal"]["breaker"]
    return breaker


def test_pool_without_failures_has_no_advice(run: Run) -> None:
    assert pool_of(run) == {
        "state": "healthy",
        "failures": 0,
        "open_until": None,
        "last_error": "",
        "advice": "",
    }


def test_operator_sees_the_backend_message_and_advice(run: Run) -> None:
    found = pool_of(run, requires_intervention=True, failures=1, last_error=seed_fleet.QUOTA)
    assert found["state"] == "action_required"
    assert found["last_error"] == seed_fleet.QUOTA
    assert "(the server's environment)" in found["advice"]
    assert "restarts a replica of this pool" in found["advice"]
    credential = Credential.objects.create(
        name="Team", kind="modal", created_at=timezone.now(), changed_at=timezone.now()
    )
    result = pool_of(run, requires_intervention=True, last_error="x", credential=credential)
    assert "(the credential Team)" in result["advice"]


def test_open_breaker_has_its_end(run: Run) -> None:
    until = timezone.now() + datetime.timedelta(seconds=50)
    result = pool_of(run, failures=3, open_until=until, last_error="503")
    assert result["state"] == "open"
    assert result["open_until"].startswith(until.strftime("%Y-%m-%dT%H:%M:%S"))
    result = pool_of(run, failures=3, open_until=timezone.now(), last_error="503")
    assert (result["state"], result["open_until"]) == ("half_open", None)
    assert pool_of(run, failures=2, last_error="503")["state"] == "failing"


# Queries, and rows shared by page and stream.


@pytest.mark.parametrize("replicas", [10, 40])
def test_number_of_queries_of_rows_does_not_grow(
    replicas: int, django_assert_num_queries: Any
) -> None:
    run = seed_fleet.mixed(seed.user("olga", "operator"), replicas=replicas, committed=0)
    with django_assert_num_queries(3):
        fleet.pool_rows(run)
    with django_assert_num_queries(3):
        fleet.replica_rows(run)
    replica = Replica.objects.select_related("pool").filter(run=run).first()
    assert replica is not None
    with django_assert_num_queries(3):
        fleet.replica_row(replica)
        fleet.attempt_rows(replica)


def test_deltas_carry_the_rows_of_the_snapshot(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from runs.metrics.changes import Changes
    from runs.queries import publish

    published: list[Any] = []
    monkeypatch.setattr(
        publish.live_stream, "publish", lambda run_id, delta: published.append(delta)
    )
    changes = Changes()
    changes.replicas = True
    publish.publish_changes(run, changes)
    snapshot = selectors.snapshot(run)
    [delta] = json.loads(json.dumps(published))
    assert delta["replicas"] == snapshot["replicas"]
    assert [p["id"] for p in delta["pools"]] == [p["id"] for p in snapshot["pools"]]
    assert delta["run"]["cost_usd"] == 12.3456
    assert delta["run"]["budget_usd"] == 15.0


def test_target_is_the_sum_of_pool_counts(run: Run) -> None:
    ReplicaPool.objects.filter(run=run, backend="modal").update(count=7)
    assert selectors.run_header(run)["target"] == 14
