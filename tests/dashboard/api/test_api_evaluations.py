"""Evaluations through the API: add a plan, request, cancel, read results and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runs.models import Checkpoint
from runs.queries import evaluations as queries
from tests.browser import seed_evaluations
from tests.dashboard.api.test_row_types import fields_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def checkpoint(run: Any) -> Checkpoint:
    return Checkpoint.objects.create(
        run=run, round=2, key="k", size_bytes=1, digest="d" * 64, created_at=run.created_at
    )


def test_a_plan_is_added_used_changed_and_removed(
    owner: Any, run: Any, checkpoint: Checkpoint
) -> None:
    plans = f"/runs/{run.pk}/evaluation-plans"
    added = owner.post(plans, {"name": "val", "tasks": ["arc_easy"], "every": 0}).json()
    assert (added["name"], added["tasks"], added["tokens"]) == ("val", ["arc_easy"], 65_536)
    assert owner.get(plans).json() == [added]
    changed = {**added, "every": 5}
    del changed["series"]
    assert owner.post(plans, changed).json()["every"] == 5

    path = f"/runs/{run.pk}/evaluate"
    assert owner.post(path, {"name": "val"}).json()["changed"] is True
    assert owner.post(path, {"name": "val", "round": 2}).json()["changed"] is False
    [row] = owner.get(f"/runs/{run.pk}/evaluations").json()
    assert (row["plan"], row["round"], row["state"], row["metrics"]) == ("val", 2, "queued", [])
    cancel = {"name": "val", "round": 2}
    assert owner.post(f"{path}/cancel", cancel).json()["changed"] is True
    assert owner.post(f"{path}/cancel", cancel).json()["changed"] is False
    refused = owner.post(f"{plans}/remove", {"name": "val"})
    assert refused.status_code == 409
    assert refused.json()["detail"] == "cancel the running evaluation of val first"
    run.evaluations.update(state="cancelled")
    assert owner.post(f"{plans}/remove", {"name": "val"}).json()["changed"] is True
    assert owner.post(f"{plans}/remove", {"name": "val"}).json()["changed"] is False


def test_results_and_logs(owner: Any, run: Any) -> None:
    plan = seed_evaluations.evaluations(run, 1, 2, tasks=("arc_easy",))
    rows = owner.get(f"/runs/{run.pk}/evaluations").json()
    assert [row["round"] for row in rows] == [2, 1]
    names = [metric["name"] for metric in rows[0]["metrics"]]
    assert names == ["loss", "perplexity", "arc_easy_acc"]
    [shown] = owner.get(f"/runs/{run.pk}/evaluation-plans").json()
    assert shown["series"] == ["eval-val-loss", "eval-val-perplexity", "eval-val-arc_easy_acc"]
    points = owner.get(f"/runs/{run.pk}/points", series="eval-val-loss").json()
    assert points["round"] == [1, 2]
    path = f"/runs/{run.pk}/evaluations/{rows[0]['id']}/attempts"
    [attempt] = owner.get(path).json()
    assert attempt["log"].startswith("reading the shards")
    assert owner.get(f"/runs/{run.pk}/evaluations/999999/attempts").status_code == 404
    assert plan.evaluations.count() == 2


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"name": "A B"}, "name", "lower-case letters"),
        ({"name": "val", "backend": "moon"}, "backend", "expected a backend of"),
        ({"name": "val", "credential": "none"}, "credential", "expected a credential for local"),
        ({"name": "val", "data": "ftp://x"}, "data", "found ftp://"),
        ({"name": "val", "tokens": 0}, "tokens", "found neither"),
        ({"name": "val", "tasks": ["a b"]}, "tasks", "names of tasks such as arc_easy"),
        ({"name": "val", "timeout_s": 1}, "timeout_s", "enter 60 to 604,800"),
    ],
)
def test_a_wrong_plan_names_the_field(
    owner: Any, run: Any, body: dict[str, Any], field: str, message: str
) -> None:
    response = owner.post(f"/runs/{run.pk}/evaluation-plans", body)
    assert response.status_code == 422
    [problem] = response.json()["errors"]
    assert problem["field"] == field and message in problem["message"]
    assert not run.evaluation_plans.exists()


def test_a_new_run_has_the_evaluations_of_its_document(
    owner: Any, run: Any, settings: Any, tmp_path: Path
) -> None:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()
    plan = {"name": "val", "tasks": ["arc_easy"], "every": 2}
    document = {"name": "Measured", "pools": [{}], "evaluations": [plan]}
    wrong = owner.post("/runs", document | {"evaluations": [plan, plan]})
    assert wrong.json()["errors"][0]["field"] == "evaluations.1.name"
    wrong = owner.post("/runs", document | {"evaluations": [plan | {"tasks": ["a b"]}]})
    assert wrong.json()["errors"][0]["field"] == "evaluations.0.tasks"
    created = owner.post("/runs", document).json()["id"]
    [stored] = owner.get(f"/runs/{created}/evaluation-plans").json()
    assert {name: stored[name] for name in plan} == plan
    clone = owner.get(f"/runs/{created}/document").json()
    del stored["series"]
    assert clone["evaluations"] == [stored]
    again = owner.post("/runs", clone).json()["id"]
    assert len(owner.get(f"/runs/{again}/evaluation-plans").json()) == 1


def test_rows_have_the_fields_of_the_client(run: Any) -> None:
    from archipelago import evaluation_rows as rows

    plan = seed_evaluations.evaluations(run, 1)
    [row] = queries.evaluation_rows(run)
    assert set(row) == fields_of(rows.Evaluation)
    assert set(row["metrics"][0]) == fields_of(rows.EvaluationMetric)
    assert set(queries.plan_rows(run)[0]) == fields_of(rows.EvaluationPlan)
    [attempt] = queries.attempt_rows(run, plan.evaluations.get().pk) or []
    assert set(attempt) == fields_of(rows.EvaluationAttempt)
