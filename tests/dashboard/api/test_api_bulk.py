"""One action on several runs through the API."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from archipelago import list_rows
from runs.actions import bulk
from runs.models import Event, ReplicaAttempt, Run
from tests.browser import seed

pytestmark = pytest.mark.django_db


@pytest.fixture
def ended(run: Any) -> Any:
    return seed.run(run.owner, name="Over", state="failed", committed=1)


@pytest.fixture
def foreign(run: Any) -> Any:
    return seed.run(seed.user("oscar", "operator"), name="Foreign", committed=1)


def refusals(response: Any) -> dict[str, str]:
    assert response.status_code == 200, response.content
    results = list_rows.BulkResult.of(response.json()).results
    return {one.name: one.refusal or ("changed" if one.changed else "unchanged") for one in results}


def test_stop_of_all_that_match_leaves_out_ended_and_foreign_runs(
    owner: Any, run: Any, ended: Any, foreign: Any
) -> None:
    body = {"action": "stop", "query": "", "count": 2, "reason": "enough"}
    response = owner.post("/runs/bulk", body)
    assert refusals(response) == {"Foreign": bulk.NOT_YOURS, run.name: "changed"}
    run.refresh_from_db()
    assert (run.state, run.state_reason) == ("stopping", "enough")
    assert {one["name"]: one["state"] for one in response.json()["results"]}[run.name] == "stopping"
    foreign.refresh_from_db()
    assert foreign.state == "running"
    assert refusals(owner.post("/runs/bulk", body))[run.name] == "unchanged"


@pytest.mark.parametrize(
    ("sent", "field", "found"),
    [
        ({"query": "", "count": 1}, "count", "expected 2, the number of selected active runs"),
        ({"query": ""}, "count", "expected a value"),
        ({"count": 2}, "query", "expected either ids or query"),
        ({"query": "", "ids": [], "count": 2}, "ids", "expected"),
        ({"query": "stat:failed", "count": 2}, "query", "Did you mean state:failed?"),
        ({"query": "", "count": 2, "action": "explode"}, "action", "expected"),
    ],
)
def test_an_unconfirmed_or_invalid_request_changes_nothing(
    owner: Any, run: Any, foreign: Any, sent: dict[str, Any], field: str, found: str
) -> None:
    events = Event.objects.count()
    response = owner.post("/runs/bulk", {"action": "stop", **sent})
    assert response.status_code == 422
    (problem,) = response.json()["errors"]
    assert problem["field"] == field
    assert found in problem["message"]
    assert Event.objects.count() == events


def test_more_runs_than_the_limit_are_refused(
    owner: Any, run: Any, foreign: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MOST", 1)
    response = owner.post("/runs/bulk", {"action": "stop", "query": "", "count": 1})
    assert response.status_code == 422
    assert "expected at most 1 runs, found 2" in response.json()["detail"]
    ids = [str(run.pk)] * 501
    response = owner.post("/runs/bulk", {"action": "stop", "ids": ids, "count": 1})
    assert response.status_code == 422


def test_ids_select_runs_to_tag_archive_restore_and_delete(
    owner: Any, run: Any, ended: Any
) -> None:
    ReplicaAttempt.objects.update(ended_at=timezone.now())
    chosen = {"ids": [str(run.pk), str(ended.pk)], "count": 2}
    tagged = owner.post("/runs/bulk", {"action": "tag", "tags": ["seen"], **chosen})
    assert refusals(tagged) == {"Over": "changed", run.name: "changed"}
    archived = refusals(owner.post("/runs/bulk", {"action": "archive", **chosen}))
    assert archived["Over"] == "changed"
    assert "expected a run that is over" in archived[run.name]
    assert refusals(owner.post("/runs/bulk", {"action": "restore", **chosen}))["Over"] == "changed"
    deleted = refusals(owner.post("/runs/bulk", {"action": "delete", **chosen}))
    assert deleted["Over"] == "changed"
    assert Run.objects.get(pk=run.pk).delete_requested_at is None
