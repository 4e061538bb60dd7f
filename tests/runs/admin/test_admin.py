"""Django's admin: access, actions, and no way to edit rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from runs.models import Alert, Event, Replica, ReplicaAttempt, Run
from tests.browser import seed
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db
TABLES = (
    "run",
    "replica",
    "replicapool",
    "replicaattempt",
    "round",
    "contribution",
    "checkpoint",
    "event",
    "alert",
)
SignIn = Callable[[str], Client]


@pytest.fixture
def run(outbox: list[Any]) -> Any:
    made = seed.run(w.person("olga", "operator"), replicas=4, committed=1, sync_every=5)
    now = made.created_at
    for replica in made.replicas.all():
        ReplicaAttempt.objects.create(
            replica=replica, number=1, launch_key=f"key-{replica.pk}", created_at=now
        )
    Alert.objects.create(
        run=made, kind="stalled", level="error", message="no round", first_at=now, opened_at=now
    )
    made.checkpoints.create(round=5, key="k", size_bytes=1, digest="d", created_at=now)
    return made


@pytest.fixture
def sign_in() -> SignIn:
    def sign_in(kind: str) -> Client:
        client = Client()
        if kind == "superuser":
            user = w.person("root", superuser=True)
            User.objects.filter(pk=user.pk).update(is_staff=True)
            client.force_login(user)
        elif kind == "staff viewer":
            user = w.person("vera", "viewer")
            User.objects.filter(pk=user.pk).update(is_staff=True)
            client.force_login(user)
        elif kind != "anonymous":
            client.force_login(w.person("olga" if kind == "operator" else kind, kind))
        return client

    return sign_in


def act(client: Client, table: str, action: str, rows: list[Any]) -> list[str]:
    """Messages after a confirmed action on ``rows``."""
    data = {
        "action": action,
        "_selected_action": [str(row.pk) for row in rows],
        "confirmed": "yes",
    }
    response = client.post(f"/admin/runs/{table}/", data, follow=True)
    assert response.status_code == 200
    return [str(message) for message in response.context["messages"]]


@pytest.mark.parametrize("kind", ["anonymous", "viewer", "operator"])
def test_users_who_are_not_staff_are_redirected(sign_in: SignIn, run: Any, kind: str) -> None:
    client = sign_in(kind)
    for table in TABLES:
        response = client.get(f"/admin/runs/{table}/")
        assert response.status_code == 302
        assert "/login" in response["Location"]


@pytest.mark.parametrize("kind", ["staff viewer", "admin", "superuser"])
def test_staff_can_view_every_table_and_row(sign_in: SignIn, run: Any, kind: str) -> None:
    client = sign_in(kind)
    for table in TABLES:
        response = client.get(f"/admin/runs/{table}/")
        assert response.status_code == 200
        row = response.context["cl"].queryset[0]
        page = client.get(f"/admin/runs/{table}/{row.pk}/change/")
        assert page.status_code == 200
        assert b'name="_save"' not in page.content
        assert "script-src 'self'" in page["Content-Security-Policy"]


@pytest.mark.parametrize("kind", ["admin", "superuser"])
def test_no_row_can_be_added_edited_or_deleted(sign_in: SignIn, run: Any, kind: str) -> None:
    client = sign_in(kind)
    for table in TABLES:
        model = {m._meta.model_name: m for m in admin.site._registry}[table]
        row = model._default_manager.first()
        assert row is not None
        count = model._default_manager.count()
        for path in ("add/", f"{row.pk}/delete/", f"{row.pk}/change/"):
            assert client.post(f"/admin/runs/{table}/{path}", {"post": "yes"}).status_code == 403
        act(client, table, "delete_selected", [row])
        assert model._default_manager.count() == count


def test_a_list_costs_the_same_for_any_number_of_rows(sign_in: SignIn, run: Any) -> None:
    client = sign_in("superuser")

    def costs() -> dict[str, int]:
        result = {}
        for table in TABLES:
            with CaptureQueriesContext(connection) as queries:
                client.get(f"/admin/runs/{table}/")
            result[table] = len(queries)
        return result

    few = costs()
    other = seed.run(w.person("oscar", "operator"), replicas=12, committed=4, sync_every=5)
    other.checkpoints.create(round=1, key="k", size_bytes=1, digest="d", created_at=run.created_at)
    for replica in other.replicas.all():
        replica.attempts.create(number=1, launch_key=f"key-{replica.pk}", created_at=run.created_at)
    assert costs() == few


def test_a_list_can_be_filtered_by_state_and_run(sign_in: SignIn, run: Any) -> None:
    client = sign_in("admin")
    seed.run(w.person("oscar", "operator"), replicas=3, committed=0)
    Replica.objects.filter(run=run, number=1).update(state="failed")
    result = client.get("/admin/runs/replica/", {"state__exact": "failed"}).context["cl"].queryset
    assert [(r.run_id, r.number) for r in result] == [(run.pk, 1)]
    result = client.get("/admin/runs/replica/", {"run__id__exact": str(run.pk)}).context["cl"]
    assert result.queryset.count() == 4


# Actions.


def test_read_only_staff_have_no_actions(sign_in: SignIn, run: Any) -> None:
    client = sign_in("staff viewer")
    assert b'value="stop"' not in client.get("/admin/runs/run/").content
    assert b'value="drain"' not in client.get("/admin/runs/replica/").content
    act(client, "run", "stop", [run])
    act(client, "replica", "restart", list(run.replicas.all()))
    assert Run.objects.get(pk=run.pk).state == "running"
    assert not run.replicas.filter(state="restarting").exists()


@pytest.mark.parametrize("kind", ["admin", "superuser"])
def test_an_admin_stops_a_run(
    sign_in: SignIn, run: Any, kind: str, outbox: list[tuple[Any, ...]]
) -> None:
    over = seed.run(run.owner, name="Over", state="succeeded", committed=0)
    messages = act(sign_in(kind), "run", "stop", [run, over])
    assert Run.objects.get(pk=run.pk).state == "stopping"
    assert sorted(messages) == [
        "Local demo: stopping; replicas end at the newest committed round and write the final "
        "weights",
        "Over is succeeded and cannot be stopped",
    ]
    event = Event.objects.get(run=run, to_state="stopping")
    assert event.actor == User.objects.get(username="root" if kind == "superuser" else "admin")
    assert outbox == [("reconcile_run", str(run.pk))]


@pytest.mark.parametrize(
    ("quorum", "expected"),
    [
        (4, "Local demo: live 3 < quorum 4: the run will stall"),
        (3, "Local demo: live 3, quorum 3: the run continues"),
    ],
)
@pytest.mark.parametrize(("action", "state"), [("drain", "draining"), ("restart", "restarting")])
def test_the_consequence_is_shown(
    sign_in: SignIn, run: Any, quorum: int, expected: str, action: str, state: str
) -> None:
    run.group_settings["min_quorum"] = quorum
    run.save()
    replica = run.replicas.get(number=2)
    messages = act(sign_in("admin"), "replica", action, [replica])
    assert messages[-1] == expected
    assert messages[0].startswith("replica 2 of Local demo: ")
    replica.refresh_from_db()
    assert replica.state == state
    assert Event.objects.get(to_state=state).actor.get_username() == "admin"


def test_a_refused_action_is_reported_and_the_others_are_done(sign_in: SignIn, run: Any) -> None:
    Replica.objects.filter(run=run, number=0).update(state="done")
    messages = act(sign_in("admin"), "replica", "restart", list(run.replicas.all())[:2])
    assert messages == [
        "replica 0 of Local demo: replica 0 is done and cannot become restarting",
        "replica 1 of Local demo: will be relaunched",
        "Local demo: live 2, quorum 1: the run continues",
    ]
    messages = act(sign_in("admin"), "replica", "drain", [run.replicas.get(number=0)])
    assert messages == ["replica 0 of Local demo is done, nothing to do"]


def test_an_ended_run_restarts_no_replica(sign_in: SignIn, run: Any) -> None:
    Run.objects.filter(pk=run.pk).update(state="succeeded")
    [message] = act(sign_in("admin"), "replica", "restart", [run.replicas.get(number=1)])
    assert "replica 1 of a run that is succeeded" in message
    assert not run.replicas.filter(state="restarting").exists()
