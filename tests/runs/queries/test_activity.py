"""Events and alerts in one list; findings and log files of a stored run."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from archipelago import run_page_rows
from runs.models import Event, LogLine, Run
from runs.queries import activity, findings, selectors
from runs.queries.activity import Filters
from runs.queries.log_files import log_file
from tests.browser import seed

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Any:
    run = seed.run(seed.user("olga", "operator"), replicas=3, committed=2)
    Event.objects.filter(run=run).delete()
    now = timezone.now()
    replica = run.replicas.get(number=2)
    for age, level, message, about in (
        (30, "info", "submitted", None),
        (20, "error", "exited with 100% of its memory", replica),
    ):
        at = now - timedelta(seconds=age)
        Event.objects.create(
            run=run, at=at, level=level, message=message, replica=about, kind="replica"
        )
    opened = now - timedelta(seconds=25)
    run.alerts.create(
        kind="spike", level="warning", message="loss 9", first_at=opened, opened_at=opened
    )
    return selectors.runs_for(run.owner).get(pk=run.pk)


def test_events_and_alerts_are_one_list(run: Run) -> None:
    rows = activity.activity(run)
    assert [row["source"] for row in rows] == ["event", "alert", "event"]
    assert rows[0]["replica"] == 2
    assert rows[1]["title"] == "Loss spike"
    json.dumps(rows)
    assert set(rows[0]) == set(rows[1]) == set(run_page_rows.Activity.__dataclass_fields__)


@pytest.mark.parametrize(
    ("filters", "messages"),
    [
        ({"source": "alert"}, ["loss 9"]),
        ({"source": "event", "level": "error"}, ["exited with 100% of its memory"]),
        ({"level": "warning"}, ["exited with 100% of its memory", "loss 9"]),
        ({"replica": 2}, ["exited with 100% of its memory"]),
        ({"text": "100%"}, ["exited with 100% of its memory"]),
        ({"text": "%"}, ["exited with 100% of its memory"]),
        ({"replica": 10**9}, []),
    ],
)
def test_filters(run: Run, filters: dict[str, Any], messages: list[str]) -> None:
    assert [row["message"] for row in activity.activity(run, Filters(**filters))] == messages


def test_older_rows(run: Run) -> None:
    first = activity.activity(run, limit=1)[0]
    assert first["message"].startswith("exited")
    before = Event.objects.get(pk=first["id"]).at
    assert [row["message"] for row in activity.activity(run, Filters(before=before))] == [
        "loss 9",
        "submitted",
    ]


def test_number_of_queries(run: Run, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(2):
        activity.activity(run)
    with django_assert_num_queries(9):
        rows = findings.of_run(run)
    assert set(rows[0]) == set(run_page_rows.Finding.__dataclass_fields__)


def test_a_log_file_has_the_lines_that_match(run: Run) -> None:
    LogLine.objects.filter(replica__run=run).delete()
    replicas = {replica.number: replica for replica in run.replicas.all()}
    now = timezone.now()
    for number, level, message in (
        (0, "INFO", "started"),
        (1, "error", "Traceback\n  line 3"),
        (1, "info", "bytes \ud800 of a replica".encode("utf-8", "replace").decode()),
    ):
        LogLine.objects.create(
            replica=replicas[number], at=now, level=level, message=message, incarnation="1"
        )
    text = b"".join(log_file(run, "txt", replica=1)).decode()
    assert "replica 1 error: Traceback\n      line 3\n" in text
    assert "started" not in text
    [line] = b"".join(log_file(run, "jsonl", level="error")).splitlines()
    assert json.loads(line)["message"] == "Traceback\n  line 3"
    assert b"".join(log_file(run, "txt", text="nowhere")) == b""
