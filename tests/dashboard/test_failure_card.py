"""The card of a failed run or replica: cause, explanation, traceback, last lines, and actions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from runs.models import LogLine, Replica, ReplicaAttempt, Run
from runs.queries import failures
from tests.browser import seed, seed_usage
from tests.dashboard.page_harness import client_for

pytestmark = pytest.mark.django_db

MESSAGE = "OOMKilled: more than its 24Gi\nLast State: <Terminated>"
HEAD = "Replica 1 failed: out of memory"


def fail(run: Run, number: int = 1, **changes: Any) -> Replica:
    """Give a replica of a failed run a failed attempt, as the control plane does."""
    now = timezone.now()
    replica = run.replicas.get(number=number)
    values = {"cause": "out_of_memory", "exit_code": 137, "message": MESSAGE} | changes
    ReplicaAttempt.objects.create(
        replica=replica,
        number=1,
        launch_key=f"{run.pk}-{number}",
        created_at=run.created_at,
        launched_at=run.created_at,
        ended_at=now,
        **values,
    )
    reason = f"out of memory, exit code 137: {MESSAGE}"
    run.replicas.update(state="done")
    Replica.objects.filter(pk=replica.pk).update(state="failed", state_reason=reason)
    Run.objects.filter(pk=run.pk).update(state_reason=f"replica {number}: {reason}")
    replica.refresh_from_db()
    run.refresh_from_db()
    return replica


@pytest.fixture
def failed() -> Run:
    owner = seed.user("olga", "operator")
    run: Run = seed.run(owner, name="Failed", state="failed", committed=3, replicas=3)
    fail(run)
    return run


def card(client: Client, run: Run) -> str:
    return client.get(reverse("run", args=[run.pk]), {"part": "failure"}).content.decode()


ACTIONS = {
    "viewer": {"Open log"},
    "stranger": {"Open log", "Clone"},
    "owner": {"Open log", "Resume", "Clone"},
    "admin": {"Open log", "Resume", "Clone"},
}


@pytest.mark.parametrize("kind", ACTIONS)
def test_actions_follow_the_role(failed: Run, kind: str) -> None:
    text = card(client_for(kind, failed.owner), failed)
    assert HEAD in text
    shown = {name for name in ("Open log", "Resume", "Restart", "Clone") if name in text}
    assert shown == ACTIONS[kind]
    assert reverse("replica", args=[failed.pk, 1]) + "?attempt=1#h-log" in text
    page = client_for(kind, failed.owner).get(reverse("run", args=[failed.pk])).content.decode()
    assert page.count(HEAD) == 1


def test_the_actions_work(failed: Run) -> None:
    client = client_for("owner", failed.owner)
    client.post(reverse("run-resume", args=[failed.pk]))
    failed.refresh_from_db()
    assert failed.state == "queued"
    assert card(client, failed).strip() == ""


def test_a_run_that_is_being_released_cannot_be_resumed(failed: Run) -> None:
    ReplicaAttempt.objects.create(
        replica=failed.replicas.get(number=0),
        number=1,
        launch_key="open",
        created_at=timezone.now(),
    )
    assert "Resume" not in card(client_for("owner", failed.owner), failed)


def test_message_traceback_and_last_lines(failed: Run) -> None:
    seed_usage.add_traceback(failed, 1)
    text = card(client_for("viewer", failed.owner), failed)
    assert "used more memory than its machine" in text
    assert "more than its 24Gi\nLast State: &lt;Terminated&gt;" in text
    assert "exit code 137" in text
    assert text.count("torch.OutOfMemoryError") == 1, "the last lines repeat the traceback"
    assert "upload retried once" in text


def test_a_traceback_of_an_earlier_attempt_is_not_the_cause(failed: Run) -> None:
    seed_usage.add_traceback(failed, 1)
    ReplicaAttempt.objects.update(created_at=timezone.now() + timedelta(hours=1))
    assert "torch.OutOfMemoryError" not in card(client_for("viewer", failed.owner), failed)


def test_a_traceback_from_the_backend_stands_once(failed: Run) -> None:
    trace = "Traceback (most recent call last):\n  File x\nRuntimeError: bad"
    ReplicaAttempt.objects.update(cause="error", exit_code=1, message=f"exited\n{trace}")
    failure = failures.run_failure(failed)
    assert failure is not None
    assert failure.message == "exited"
    assert failure.traceback.endswith("RuntimeError: bad")


def test_everything_is_bounded(failed: Run) -> None:
    replica = failed.replicas.get(number=1)
    ReplicaAttempt.objects.update(message="m" * 100_000)
    LogLine.objects.bulk_create(
        LogLine(
            replica=replica,
            incarnation=replica.incarnation,
            at=timezone.now(),
            level="info",
            message=f"line {n} " + "x" * 10_000,
        )
        for n in range(100)
    )
    LogLine.objects.create(
        replica=replica,
        incarnation=replica.incarnation,
        at=timezone.now(),
        level="error",
        message="Traceback (most recent call last)" + "y" * 1_000_000 + "the end",
    )
    failure = failures.run_failure(failed)
    assert failure is not None
    assert len(failure.message) == failures.MESSAGE_CHARS
    assert len(failure.traceback) == failures.TEXT_CHARS
    assert failure.traceback.endswith("the end")
    assert len(failure.lines) == failures.LINES
    assert failure.lines[-1].message.startswith("line 99 ")
    assert all(len(line.message) == failures.LINE_CHARS for line in failure.lines)


def test_a_setting_that_a_restart_does_not_fix(failed: Run) -> None:
    ReplicaAttempt.objects.update(cause="error", exit_code=78)
    assert "a restart does not fix" in card(client_for("viewer", failed.owner), failed)


def test_a_run_that_failed_without_a_replica() -> None:
    owner = seed.user("olga", "operator")
    reason = "cannot write in s3://missing: AccessDenied"
    run = seed.run(owner, name="Bad bucket", state="failed", committed=0, reason=reason)
    text = card(client_for("owner", owner), run)
    assert "The run failed" in text
    assert reason in text
    assert reverse("run", args=[run.pk]) + "?tab=logs" in text


def test_a_run_whose_replicas_were_lost_shows_the_last_one(failed: Run) -> None:
    reason = "all replicas have ended and none wrote the final weights"
    failed.replicas.update(state="lost")
    Run.objects.filter(pk=failed.pk).update(state_reason=reason)
    text = card(client_for("viewer", failed.owner), failed)
    assert "Replica 1 was lost: out of memory" in text
    assert f"{reason}\nOOMKilled" in text


def test_the_rail_of_the_page_has_the_finding(failed: Run) -> None:
    client = client_for("owner", failed.owner)
    page = client.get(reverse("run", args=[failed.pk])).content.decode()
    findings = page.partition("data-findings=")[2].partition("</section>")[0]
    assert "<b>replica 1 failed</b>" in findings


@pytest.mark.parametrize("state", ["running", "succeeded", "cancelled"])
def test_other_runs_have_no_card(state: str) -> None:
    owner = seed.user("olga", "operator")
    run = seed.run(owner, name="Fine", state=state, committed=3)
    assert card(client_for("owner", owner), run).strip() == ""


def test_the_page_of_a_failed_replica_has_the_card() -> None:
    owner = seed.user("olga", "operator")
    run = seed.run(owner, name="Running", committed=3, replicas=3)
    fail(run)
    seed_usage.add_traceback(run, 1)
    client = client_for("owner", owner)
    page = client.get(reverse("replica", args=[run.pk, 1])).content.decode()
    assert HEAD in page
    assert page.count("torch.OutOfMemoryError") == 1
    assert "Last traceback" not in page
    assert page.count(reverse("replica-restart", args=[run.pk, 1])) == 1
    others = client.get(reverse("replica", args=[run.pk, 0])).content.decode()
    assert "h-failure" not in others


def test_a_silent_or_ended_replica_shows_no_pace() -> None:
    owner = seed.user("olga", "operator")
    run = seed.run(owner, name="Running", committed=3, replicas=3)
    Replica.objects.filter(run=run).update(tokens_per_s=5600.0)
    client = client_for("owner", owner)

    def page(number: int) -> str:
        return client.get(reverse("replica", args=[run.pk, number])).content.decode()

    assert "5,600" in page(0)
    Replica.objects.filter(run=run, number=0).update(beat_at=timezone.now() - timedelta(minutes=38))
    assert "5,600" not in page(0)
    fail(run)
    assert "5,600" not in page(1)


def test_the_number_of_queries_is_constant() -> None:
    owner = seed.user("olga", "operator")
    counts = []
    for replicas in (3, 30):
        run = seed.run(owner, name="Failed", state="failed", committed=1, replicas=replicas)
        fail(run)
        with CaptureQueriesContext(connection) as queries:
            failures.run_failure(run)
        counts.append(len(queries))
    assert counts[0] == counts[1]
