"""What an administrator does to replicas: asked first, with what will follow, and then done."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from executors.base import Cause, JobState, NeedsPerson, ReplicaStatus
from runs.actions import admin_overrides
from runs.exceptions import IllegalTransition
from runs.models import Alert, Event, ReplicaAttempt, ReplicaPool
from tests.runs import world as w

pytestmark = pytest.mark.django_db
DEEDS = ("drain", "restart", "evict", "kill", "mark_lost", "add_to_pool")
LIST = "/admin/runs/replica/"


@pytest.fixture
def world(make_world: Any) -> Any:
    made = make_world(replicas=4, min_quorum=4)
    made.start()
    return made


@pytest.fixture
def client() -> Client:
    made = Client()
    made.force_login(w.person("admin", "admin"))
    return made


def post(client: Client, action: str, rows: list[Any], **more: str) -> Any:
    data = {"action": action, "_selected_action": [str(row.pk) for row in rows], **more}
    return client.post(more.pop("to", LIST), data, follow=True)


def do(client: Client, action: str, *rows: Any) -> list[str]:
    answer = post(client, action, list(rows), confirmed="yes")
    return [str(message) for message in answer.context["messages"]]


def foretold(answer: Any) -> list[str]:
    return [one["words"] for one in answer.context["foretold"]]


@pytest.mark.parametrize("action", DEEDS)
def test_nothing_is_done_before_it_is_confirmed(world: Any, client: Client, action: str) -> None:
    before = list(world.run.replicas.values_list("state", "cancel_at", "restarts"))
    events = Event.objects.count()
    answer = post(client, action, [world.replica(1), world.replica(2)])
    assert answer.status_code == 200
    page = answer.content.decode()
    assert "replica 1" in page
    assert "No, take me back" in page
    assert list(world.run.replicas.values_list("state", "cancel_at", "restarts")) == before
    assert Event.objects.count() == events
    assert ReplicaPool.objects.get().count == 4


@pytest.mark.parametrize(
    ("action", "quorum", "said"),
    [
        ("drain", 4, "Test run: live 3 < quorum 4: the run will stall"),
        ("evict", 4, "Test run: live 3 < quorum 4: the run will stall"),
        ("kill", 4, "Test run: live 3 < quorum 4: the run will stall until they are back"),
        ("restart", 4, "Test run: live 3 < quorum 4: the run will stall until they are back"),
        ("mark_lost", 4, "Test run: live 3 < quorum 4: the run will stall until they are back"),
        ("drain", 3, "Test run: live 3, quorum 3: the run goes on"),
        ("add_to_pool", 4, "Test run: local cpu: 5 wanted, $0.00 an hour more"),
    ],
)
def test_it_says_what_will_follow(
    world: Any, client: Client, action: str, quorum: int, said: str
) -> None:
    world.run.group_settings["min_quorum"] = quorum
    world.run.save()
    assert foretold(post(client, action, [world.replica(1)])) == [said]


def test_who_does_not_work_is_missed_by_nobody(world: Any, client: Client) -> None:
    world.run.replicas.filter(number=1).update(state="suspect")
    assert foretold(post(client, "evict", [world.replica(1)])) == [
        "Test run: live 3 < quorum 4: the run will stall"
    ]
    world.run.group_settings["min_quorum"] = 3
    world.run.save()
    assert "goes on" in foretold(post(client, "evict", [world.replica(1)]))[0]


def test_what_it_costs_that_is_not_known_is_said(world: Any, client: Client) -> None:
    ReplicaPool.objects.update(price_usd_h=None)
    answer = post(client, "add_to_pool", [world.replica(0), world.replica(1)])
    assert foretold(answer) == ["Test run: local cpu: 6 wanted, what that costs is unknown"]


def test_the_list_s_filters_come_back_and_do_not_change_what_is_done(
    world: Any, client: Client
) -> None:
    answer = client.post(
        f"{LIST}?state__exact=computing",
        {"action": "drain", "_selected_action": [str(world.replica(1).pk)]},
    )
    assert answer.context["filters"] == "state__exact=computing"
    world.run.replicas.update(state="waiting")  # meanwhile
    done = client.post(
        LIST,
        {"action": "drain", "_selected_action": [str(world.replica(1).pk)], "confirmed": "yes",
         "filters": "state__exact=computing"},
    )  # fmt: skip
    assert done["Location"] == f"{LIST}?state__exact=computing"
    assert world.replica(1).state == "draining"


@pytest.mark.parametrize(
    ("action", "state"),
    [("drain", "draining"), ("evict", "draining"), ("restart", "restarting"),
     ("kill", "restarting"), ("mark_lost", "lost")],
)  # fmt: skip
def test_each_is_done_with_an_event_of_who_did_it(
    world: Any, client: Client, action: str, state: str
) -> None:
    first = do(client, action, world.replica(1))[0]
    assert first.startswith("replica 1 of Test run: ")
    assert world.replica(1).state == state
    event = Event.objects.get(to_state=state, replica=world.replica(1))
    assert event.actor == User.objects.get(username="admin")
    assert ("reconcile_run", str(world.run.pk)) in world.outbox


def test_one_that_is_killed_counts_and_comes_back(world: Any, client: Client) -> None:
    do(client, "kill", world.replica(1))
    world.beat_all(but=(1,))
    world.tick()
    assert world.executor.cancelled == [world.key(1)]
    assert world.replica(1).restarts == 1
    assert Alert.objects.filter(kind="replica_lost", replica=world.replica(1)).exists()
    world.executor.end(world.key(1), Cause.CANCELLED)
    for _ in range(3):
        world.beat_all(but=(1,))
        world.tick(2)
        world.work()
    assert world.replica(1).state == "provisioning"
    assert world.replica(1).attempts.count() == 2


def test_one_without_restarts_left_is_not_killed(world: Any, client: Client) -> None:
    world.run.replicas.filter(number=1).update(restarts=3)
    [said] = do(client, "kill", world.replica(1))
    assert "whose 3 restarts are used up: restart or evict it" in said
    assert world.replica(1).state == "computing"


def test_one_that_is_evicted_stays_away(world: Any, client: Client) -> None:
    do(client, "evict", world.replica(1))
    world.beat_all(but=(1,))
    world.tick()
    assert world.executor.cancelled == [world.key(1)]
    world.executor.end(world.key(1), Cause.CANCELLED)
    for _ in range(3):
        world.beat_all(but=(1,))
        world.tick(30)
        world.work()
    assert (world.replica(1).state, world.replica(1).attempts.count()) == ("evicted", 1)


def test_one_that_is_marked_lost_is_replaced_without_its_backend(
    world: Any, client: Client
) -> None:
    do(client, "mark_lost", world.replica(1))
    attempt = world.replica(1).attempts.get()
    assert (attempt.cause, attempt.message) == ("lost", "marked as lost by admin")
    assert do(client, "mark_lost", world.replica(1)) == [
        "replica 1 of Test run is lost, nothing to do"
    ]
    for _ in range(3):
        world.beat_all(but=(1,))
        world.tick(3)
        world.work()
    assert world.replica(1).state == "provisioning"
    assert world.executor.cancelled == []  # the reaper will


def test_one_more_is_added_to_its_pool(world: Any, client: Client) -> None:
    do(client, "add_to_pool", world.replica(1), world.replica(2))
    assert ReplicaPool.objects.get().count == 6
    assert world.run.replicas.count() == 6


def test_what_cannot_be_added_is_said(world: Any, client: Client) -> None:
    world.run.group_settings["max_replicas"] = 4
    world.run.save()
    [said] = do(client, "add_to_pool", world.replica(1))
    assert "expected at most 4 replicas over the run's life" in said
    assert ReplicaPool.objects.get().count == 4


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (ReplicaStatus(state=JobState.RUNNING), "says running"),
        (ReplicaStatus(state=JobState.PENDING, phase="Scheduling"), "says pending (Scheduling)"),
        (
            ReplicaStatus(state=JobState.RUNNING, started_wall_s=1_893_456_000.0),
            "says running since 2030-01-01 00:00 UTC",
        ),
        (
            ReplicaStatus(state=JobState.ENDED, cause=Cause.OUT_OF_MEMORY, message="killed"),
            "says ended of out of memory: killed",
        ),
        (NeedsPerson("no such token"), "could not be asked: no such token"),
        (OSError("hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"), "could not be asked: OSError"),
    ],
)
def test_its_backend_is_asked_at_once(
    world: Any, client: Client, monkeypatch: pytest.MonkeyPatch, status: Any, said: str
) -> None:
    def poll(_: Any) -> Any:
        if isinstance(status, Exception):
            raise status
        return [status]

    monkeypatch.setattr(world.executor, "poll", poll)
    monkeypatch.setattr(admin_overrides, "executor_of", lambda *_: world.executor)
    answer = post(client, "ask", [world.replica(1)])
    label = "Local processes on this machine"
    [message] = [str(message) for message in answer.context["messages"]]
    assert message == f"replica 1 of Test run: {label} {said}"
    assert world.replica(1).state == "computing"


def test_one_that_never_had_a_job_has_none(world: Any, client: Client) -> None:
    ReplicaAttempt.objects.all().delete()
    answer = post(client, "ask", [world.replica(1)])
    assert "replica 1 of Test run: has no job" in [str(m) for m in answer.context["messages"]]
    assert not admin_overrides.kill_replica(world.replica(1), actor=world.run.owner)


def test_nobody_is_killed_in_a_run_that_is_over(world: Any) -> None:
    world.run.__class__.objects.update(state="succeeded")
    with pytest.raises(IllegalTransition, match="of a run that is succeeded"):
        admin_overrides.kill_replica(world.replica(1), actor=world.run.owner)


@pytest.mark.parametrize("action", [*DEEDS, "ask"])
@pytest.mark.parametrize("kind", ["anonymous", "viewer", "owner", "staff viewer"])
def test_nobody_else_may(world: Any, kind: str, action: str) -> None:
    client = Client()
    if kind == "staff viewer":
        user = w.person("vera", "viewer")
        User.objects.filter(pk=user.pk).update(is_staff=True)
        client.force_login(user)
    elif kind != "anonymous":
        client.force_login(world.run.owner if kind == "owner" else w.person(kind, kind))
    world.outbox.clear()
    data = {"action": action, "_selected_action": [str(world.replica(1).pk)], "confirmed": "yes"}
    answer = client.post(LIST, data)
    assert answer.status_code == (302 if kind != "staff viewer" else answer.status_code)
    assert world.replica(1).state == "computing"
    assert ReplicaPool.objects.get().count == 4
    assert world.outbox == []
