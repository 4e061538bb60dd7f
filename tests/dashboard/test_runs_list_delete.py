"""Bulk deletion: confirmation page, required number, and runs that are kept."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from runs.models import ReplicaAttempt, Run
from tests.browser import seed
from tests.dashboard.page_harness import client_for, make_runs, messages_of

pytestmark = pytest.mark.django_db


def to_delete(*runs: Run, **more: str) -> dict[str, Any]:
    return {"do": "delete", "id": [str(run.pk) for run in runs], "back": "q=r"} | more


def test_the_confirmation_lists_deleted_and_kept_runs(client: Client, operator_user: Any) -> None:
    (running,) = make_runs(operator_user, 1)
    over, busy = make_runs(operator_user, 2, state="failed")
    deleting = seed.run(
        operator_user, name="being deleted", state="failed", committed=0, replicas=1
    )
    foreign = seed.run(
        seed.user("oscar", "operator"), name="not mine", state="failed", committed=0, replicas=1
    )
    Run.objects.filter(pk=deleting.pk).update(delete_requested_at=timezone.now())
    ReplicaAttempt.objects.filter(replica__run__in=[over, deleting]).update(ended_at=timezone.now())
    ReplicaAttempt.objects.create(
        replica=busy.replicas.get(), number=9, launch_key="busy", created_at=timezone.now()
    )
    response = client.post("/runs/bulk", to_delete(running, over, busy, deleting, foreign))
    page = response.content.decode()
    assert "Delete 1 run?" in page
    assert response.context["runs"] == [over]
    assert {run.pk: why for run, why in response.context["kept"]} == {
        foreign.pk: "operators can change only their own runs",
        running.pk: "expected a run that is over, found one running",
        busy.pk: "its machines are still being released; try again in a moment",
        deleting.pk: "it is being deleted already",
    }
    assert Run.objects.filter(delete_requested_at=None).count() == 4


@pytest.mark.parametrize("typed", ["", "1", "3", "two", "2.0"])
def test_the_number_of_runs_is_required(client: Client, operator_user: Any, typed: str) -> None:
    runs = make_runs(operator_user, 2, state="failed")
    sent = to_delete(*runs, confirmed="1", count=typed, objects="1")
    response = client.post("/runs/bulk", sent)
    assert response.status_code == 422
    page = response.content.decode()
    assert "Enter 2, the number" in page
    assert 'name="objects" value="1" checked' in page
    assert not Run.objects.exclude(delete_requested_at=None).exists()


def test_confirmed_runs_are_deleted(client: Client, operator_user: Any) -> None:
    runs = make_runs(operator_user, 2, state="failed")
    sent = to_delete(*runs, confirmed="1", count=" 2 ")
    response = client.post("/runs/bulk", sent)
    assert response["Location"] == "/?q=r"
    result = client.get("/")
    assert "Deleting 2 runs" in messages_of(result)
    assert result.content.decode().count(">being deleted<") == 2
    assert Run.objects.exclude(delete_requested_at=None).count() == 2
    assert not Run.objects.filter(delete_objects=True).exists()


def test_failed_deletions_are_listed_per_run(client: Client, operator_user: Any) -> None:
    inside, outside = make_runs(operator_user, 2, state="failed")
    Run.objects.filter(pk=outside.pk).update(rendezvous="s3://b/runs")
    Run.objects.filter(pk=inside.pk).update(rendezvous="s3://b/runs/inside")
    sent = to_delete(inside, outside, confirmed="1", count="2", objects="1")
    page = client.post("/runs/bulk", sent).content.decode()
    assert "1 run being deleted" in page
    assert "The rendezvous of &#x27;r0&#x27; is inside this one" in page
    assert 'name="count"' not in page
    kept = Run.objects.get(delete_requested_at=None)
    assert kept == outside


@pytest.mark.parametrize(
    ("kind", "status", "gone"),
    [
        ("anonymous", 302, 0),
        ("viewer", 403, 0),
        ("stranger", 422, 0),
        ("owner", 302, 1),
        ("admin", 302, 1),
    ],
)
def test_bulk_delete_permissions(operator_user: Any, kind: str, status: int, gone: int) -> None:
    (run,) = make_runs(operator_user, 1, state="failed")
    client = client_for(kind, operator_user)
    response = client.post("/runs/bulk", to_delete(run, confirmed="1", count="1"))
    assert response.status_code == status
    assert Run.objects.exclude(delete_requested_at=None).count() == gone


def test_the_number_of_queries_does_not_depend_on_runs(client: Client, operator_user: Any) -> None:
    def count_queries(*runs: Run) -> int:
        with CaptureQueriesContext(connection) as queries:
            client.post("/runs/bulk", to_delete(*runs))
        return len(queries)

    runs = make_runs(operator_user, 6, state="failed")
    assert count_queries(*runs) == count_queries(runs[0])
