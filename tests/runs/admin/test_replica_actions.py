"""Administrator actions on replicas: confirmed with their consequences, then executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from executors.base import AccountError, Cause, JobState, ReplicaStatus
from runs.actions import admin_overrides
from runs.exceptions import IllegalTransition
from runs.models import Alert, Event, ReplicaAttempt, ReplicaPool
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db
REPLICA_ACTIONS = ("drain", "restart", "evict", "kill", "mark_lost", "add_to_pool")
LIST = "/admin/runs/replica/"


@pytest.fixture(scope="module")
def started(share_harness: Callable[..., Any]) -> Any:
    return share_harness(replicas=4, min_quorum=4)


@pytest.fixture
def harness(started: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(started)


@pytest.fixture
def client() -> Client:
    made = Client()
    made.force_login(w.person("admin", "admin"))
    return made


def post(client: Client, action: str, rows: list[Any], **more: str) -> Any:
    data = {"action": action, "_selected_action": [str(row.pk) for row in rows], **more}
    return client.post(more.pop("to", LIST), data, follow=True)


def do(client: Client, action: str, *rows: Any) -> list[str]:
    response = post(client, action, list(rows), confirmed="yes")
    return [str(message) for message in response.context["messages"]]


def consequences(answer: Any) -> list[str]:
    return [one["words"] for one in answer.context["consequences"]]


@pytest.mark.parametrize("action", REPLICA_ACTIONS)
def test_nothing_is_done_before_it_is_confirmed(harness: Any, client: Client, action: str) -> None:
    before = list(harness.run.replicas.values_list("state", "cancel_at", "restarts"))
    events = Event.objects.count()
    response = post(client, action, [harness.replica(1), harness.replica(2)])
    assert response.status_code == 200
    page = response.content.decode()
    assert "replica 1" in page
    assert "Cancel" in page
    assert list(harness.run.replicas.values_list("state", "cancel_at", "restarts")) == before
    assert Event.objects.count() == events
    assert ReplicaPool.objects.get().count == 4


@pytest.mark.parametrize(
    ("action", "quorum", "expected"),
    [
        ("drain", 4, "Test run: live 3 < quorum 4: the run will stall"),
        ("evict", 4, "Test run: live 3 < quorum 4: the run will stall"),
        ("kill", 4, "Test run: live 3 < quorum 4: the run will stall until they are back"),
        ("restart", 4, "Test run: live 3 < quorum 4: the run will stall until they are back"),
        ("mark_lost", 4, "Test run: live 3 < quorum 4: the run will stall until they are back"),
        ("drain", 3, "Test run: live 3, quorum 3: the run continues"),
        ("add_to_pool", 4, "Test run: local cpu: 5 wanted, $0.00 an hour more"),
    ],
)
def test_the_confirmation_shows_the_consequence(
    harness: Any, client: Client, action: str, quorum: int, expected: str
) -> None:
    harness.run.group_settings["min_quorum"] = quorum
    harness.run.save()
    assert consequences(post(client, action, [harness.replica(1)])) == [expected]


def test_idle_replicas_do_not_change_the_consequence(harness: Any, client: Client) -> None:
    harness.run.replicas.filter(number=1).update(state="suspect")
    assert consequences(post(client, "evict", [harness.replica(1)])) == [
        "Test run: live 3 < quorum 4: the run will stall"
    ]
    harness.run.group_settings["min_quorum"] = 3
    harness.run.save()
    assert "continues" in consequences(post(client, "evict", [harness.replica(1)]))[0]


def test_an_unknown_cost_is_shown(harness: Any, client: Client) -> None:
    ReplicaPool.objects.update(price_usd_h=None)
    response = post(client, "add_to_pool", [harness.replica(0), harness.replica(1)])
    assert consequences(response) == ["Test run: local cpu: 6 wanted, the cost is unknown"]


def test_the_list_s_filters_return_and_do_not_change_the_action(
    harness: Any, client: Client
) -> None:
    response = client.post(
        f"{LIST}?state__exact=computing",
        {"action": "drain", "_selected_action": [str(harness.replica(1).pk)]},
    )
    assert response.context["filters"] == "state__exact=computing"
    harness.run.replicas.update(state="waiting")  # meanwhile
    done = client.post(
        LIST,
        {
            "action": "drain",
            "_selected_action": [str(harness.replica(1).pk)],
            "confirmed": "yes",
            "filters": "state__exact=computing",
        },
    )
    assert done["Location"] == f"{LIST}?state__exact=computing"
    assert harness.replica(1).state == "draining"


@pytest.mark.parametrize(
    ("action", "state"),
    [
        ("drain", "draining"),
        ("evict", "draining"),
        ("restart", "restarting"),
        ("kill", "restarting"),
        ("mark_lost", "lost"),
    ],
)
def test_each_action_records_an_event_with_its_actor(
    harness: Any, client: Client, action: str, state: str
) -> None:
    first = do(client, action, harness.replica(1))[0]
    assert first.startswith("replica 1 of Test run: ")
    assert harness.replica(1).state == state
    event = Event.objects.get(to_state=state, replica=harness.replica(1))
    assert event.actor == User.objects.get(username="admin")
    assert ("reconcile_run", str(harness.run.pk)) in harness.outbox


def test_a_killed_replica_relaunches_and_counts_as_a_restart(harness: Any, client: Client) -> None:
    do(client, "kill", harness.replica(1))
    harness.beat_all(but=(1,))
    harness.tick()
    assert harness.executor.cancelled == [harness.key(1)]
    assert harness.replica(1).restarts == 1
    assert Alert.objects.filter(kind="replica_lost", replica=harness.replica(1)).exists()
    harness.executor.end(harness.key(1), Cause.CANCELLED)
    for _ in range(3):
        harness.beat_all(but=(1,))
        harness.tick(2)
        harness.work()
    assert harness.replica(1).state == "provisioning"
    assert harness.replica(1).attempts.count() == 2


def test_a_replica_without_restarts_left_is_not_killed(harness: Any, client: Client) -> None:
    harness.run.replicas.filter(number=1).update(restarts=3)
    [message] = do(client, "kill", harness.replica(1))
    assert "whose 3 restarts are used up: restart or evict it" in message
    assert harness.replica(1).state == "computing"


def test_an_evicted_replica_does_not_return(harness: Any, client: Client) -> None:
    do(client, "evict", harness.replica(1))
    harness.beat_all(but=(1,))
    harness.tick()
    assert harness.executor.cancelled == [harness.key(1)]
    harness.executor.end(harness.key(1), Cause.CANCELLED)
    for _ in range(3):
        harness.beat_all(but=(1,))
        harness.tick(30)
        harness.work()
    assert (harness.replica(1).state, harness.replica(1).attempts.count()) == ("evicted", 1)


def test_a_replica_marked_as_lost_is_replaced_without_its_backend(
    harness: Any, client: Client
) -> None:
    do(client, "mark_lost", harness.replica(1))
    attempt = harness.replica(1).attempts.get()
    assert (attempt.cause, attempt.message) == ("lost", "marked as lost by admin")
    assert do(client, "mark_lost", harness.replica(1)) == [
        "replica 1 of Test run is lost, nothing to do"
    ]
    for _ in range(3):
        harness.beat_all(but=(1,))
        harness.tick(3)
        harness.work()
    assert harness.replica(1).state == "provisioning"
    assert harness.executor.cancelled == []  # the reaper will


def test_a_replica_is_added_to_its_pool(harness: Any, client: Client) -> None:
    do(client, "add_to_pool", harness.replica(1), harness.replica(2))
    assert ReplicaPool.objects.get().count == 6
    assert harness.run.replicas.count() == 6


def test_a_refused_addition_is_reported(harness: Any, client: Client) -> None:
    harness.run.group_settings["max_replicas"] = 4
    harness.run.save()
    [message] = do(client, "add_to_pool", harness.replica(1))
    assert "expected at most 4 replicas over the run's life" in message
    assert ReplicaPool.objects.get().count == 4


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (ReplicaStatus(state=JobState.RUNNING), "reports running"),
        (ReplicaStatus(state=JobState.PENDING, phase="Scheduling"), "reports pending (Scheduling)"),
        (
            ReplicaStatus(state=JobState.RUNNING, started_wall_s=1_893_456_000.0),
            "reports running since 2030-01-01 00:00 UTC",
        ),
        (
            ReplicaStatus(state=JobState.ENDED, cause=Cause.OUT_OF_MEMORY, message="killed"),
            "reports ended of out of memory: killed",
        ),
        (AccountError("no such token"), "could not be polled: no such token"),
        (OSError("hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"), "could not be polled: OSError"),
    ],
)
def test_its_backend_is_polled_immediately(
    harness: Any, client: Client, monkeypatch: pytest.MonkeyPatch, status: Any, expected: str
) -> None:
    def poll(_: Any) -> Any:
        if isinstance(status, Exception):
            raise status
        return [status]

    monkeypatch.setattr(harness.executor, "poll", poll)
    monkeypatch.setattr(admin_overrides, "executor_of", lambda *_: harness.executor)
    response = post(client, "ask", [harness.replica(1)])
    label = "Local processes on this machine"
    [message] = [str(message) for message in response.context["messages"]]
    assert message == f"replica 1 of Test run: {label} {expected}"
    assert harness.replica(1).state == "computing"


def test_a_replica_without_a_job_is_reported_so(harness: Any, client: Client) -> None:
    ReplicaAttempt.objects.all().delete()
    response = post(client, "ask", [harness.replica(1)])
    assert "replica 1 of Test run: has no job" in [str(m) for m in response.context["messages"]]
    assert not admin_overrides.kill_replica(harness.replica(1), actor=harness.run.owner)


def test_no_replica_of_an_ended_run_is_killed(harness: Any) -> None:
    harness.run.__class__.objects.update(state="succeeded")
    with pytest.raises(IllegalTransition, match="of a run that is succeeded"):
        admin_overrides.kill_replica(harness.replica(1), actor=harness.run.owner)


@pytest.mark.parametrize("kind", ["anonymous", "viewer", "owner", "staff viewer"])
def test_other_roles_are_refused(harness: Any, kind: str) -> None:
    client = Client()
    if kind == "staff viewer":
        user = w.person("vera", "viewer")
        User.objects.filter(pk=user.pk).update(is_staff=True)
        client.force_login(user)
    elif kind != "anonymous":
        client.force_login(harness.run.owner if kind == "owner" else w.person(kind, kind))
    harness.outbox.clear()
    row = str(harness.replica(1).pk)
    for action in (*REPLICA_ACTIONS, "ask"):
        data = {"action": action, "_selected_action": [row], "confirmed": "yes"}
        response = client.post(LIST, data)
        assert kind == "staff viewer" or response.status_code == 302, action
        assert harness.replica(1).state == "computing", action
        assert ReplicaPool.objects.get().count == 4, action
        assert harness.outbox == [], action
