"""Deleting several runs of the list: the page that asks, the number that is typed, what stays."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from runs.models import ReplicaAttempt, Run
from tests.browser import seed
from tests.dashboard.people import client_for, some, told

pytestmark = pytest.mark.django_db


def to_delete(*runs: Run, **more: str) -> dict[str, Any]:
    return {"do": "delete", "id": [str(run.pk) for run in runs], "back": "q=r"} | more


def test_deleting_lists_what_goes_and_why_others_stay(client: Client, olga: Any) -> None:
    (running,) = some(olga, 1)
    over, busy = some(olga, 2, state="failed")
    gone = seed.run(olga, name="asked before", state="failed", committed=0, replicas=1)
    foreign = seed.run(
        seed.user("oscar", "operator"), name="not mine", state="failed", committed=0, replicas=1
    )
    Run.objects.filter(pk=gone.pk).update(delete_requested_at=timezone.now())
    ReplicaAttempt.objects.filter(replica__run__in=[over, gone]).update(ended_at=timezone.now())
    ReplicaAttempt.objects.create(
        replica=busy.replicas.get(), number=9, launch_key="busy", created_at=timezone.now()
    )
    answer = client.post("/runs/bulk", to_delete(running, over, busy, gone, foreign))
    page = answer.content.decode()
    assert "Delete 1 run?" in page
    assert answer.context["runs"] == [over]
    assert {run.pk: why for run, why in answer.context["kept"]} == {
        foreign.pk: "it is not yours: operators act on their own runs",
        running.pk: "expected a run that is over, found one running",
        busy.pk: "its machines are still being released; try again in a moment",
        gone.pk: "it is being deleted already",
    }
    assert Run.objects.filter(delete_requested_at=None).count() == 4


@pytest.mark.parametrize("typed", ["", "1", "3", "two", "2.0"])
def test_the_number_has_to_be_typed(client: Client, olga: Any, typed: str) -> None:
    runs = some(olga, 2, state="failed")
    sent = to_delete(*runs, confirmed="1", count=typed, objects="1")
    answer = client.post("/runs/bulk", sent)
    assert answer.status_code == 422
    page = answer.content.decode()
    assert "Expected 2, found" in page
    assert 'name="objects" value="1" checked' in page
    assert not Run.objects.exclude(delete_requested_at=None).exists()


def test_runs_are_deleted_and_said_to_be_in_the_list(client: Client, olga: Any) -> None:
    runs = some(olga, 2, state="failed")
    sent = to_delete(*runs, confirmed="1", count=" 2 ")
    answer = client.post("/runs/bulk", sent)
    assert answer["Location"] == "/?q=r"
    found = client.get("/")
    assert "2 being deleted" in told(found)
    assert found.content.decode().count(">being deleted<") == 2
    assert Run.objects.exclude(delete_requested_at=None).count() == 2
    assert not Run.objects.filter(delete_objects=True).exists()


def test_what_could_not_be_deleted_after_all_is_told_by_run(client: Client, olga: Any) -> None:
    inside, outside = some(olga, 2, state="failed")
    Run.objects.filter(pk=outside.pk).update(rendezvous="s3://b/runs")
    Run.objects.filter(pk=inside.pk).update(rendezvous="s3://b/runs/inside")
    sent = to_delete(inside, outside, confirmed="1", count="2", objects="1")
    page = client.post("/runs/bulk", sent).content.decode()
    assert "1 run being deleted" in page
    assert "The rendezvous of &#x27;r0&#x27; lies inside this one&#x27;s" in page
    assert 'name="count"' not in page
    kept = Run.objects.get(delete_requested_at=None)
    assert kept == outside


@pytest.mark.parametrize(
    ("kind", "status", "gone"),
    [("anonymous", 302, 0), ("viewer", 403, 0), ("stranger", 422, 0), ("owner", 302, 1),
     ("admin", 302, 1)],
)  # fmt: skip
def test_who_deletes_several(olga: Any, kind: str, status: int, gone: int) -> None:
    (run,) = some(olga, 1, state="failed")
    client = client_for(kind, olga)
    answer = client.post("/runs/bulk", to_delete(run, confirmed="1", count="1"))
    assert answer.status_code == status
    assert Run.objects.exclude(delete_requested_at=None).count() == gone


def test_asking_for_many_costs_as_much_as_for_one(client: Client, olga: Any) -> None:
    def asked(*runs: Run) -> int:
        with CaptureQueriesContext(connection) as queries:
            client.post("/runs/bulk", to_delete(*runs))
        return len(queries)

    runs = some(olga, 6, state="failed")
    assert asked(*runs) == asked(runs[0])
