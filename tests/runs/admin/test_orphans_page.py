"""Orphans, prices, tokens and alerts in the admin."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from executors.base import JobState, ReplicaStatus, RetryLater
from runs.actions import api_tokens
from runs.models import Alert, ApiToken, Event
from runs.reconcile import orphan_reaper
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db
ORPHANS = "/admin/runs/replicaattempt/orphans/"
PRICES = "/admin/runs/replicapool/prices/"


def client_of(kind: str) -> Client:
    client = Client()
    if kind == "staff viewer":
        user = w.person("vera", "viewer")
        User.objects.filter(pk=user.pk).update(is_staff=True)
        client.force_login(user)
    elif kind != "anonymous":
        client.force_login(w.person(kind, kind))
    return client


@pytest.fixture(scope="module")
def started(share_harness: Any) -> Any:
    return share_harness(replicas=2)


@pytest.fixture
def harness(started: Any, copy_harness: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One job with an open attempt, one of an ended attempt, one without an attempt."""
    made = copy_harness(started)
    monkeypatch.setattr(orphan_reaper, "executor_of", lambda *_: made.executor)
    attempt = made.replica(1).attempts.get()
    attempt.ended_at = made.clock()
    attempt.save()
    made.executor.jobs["stray-0-1"] = ReplicaStatus(state=JobState.RUNNING)
    return made


def keys(client: Client) -> dict[str, str]:
    response = client.get(ORPHANS)
    assert response.status_code == 200
    return {row["launch_key"]: row["key"] for row in response.context["rows"]}


def test_jobs_without_an_active_run_are_listed(harness: Any) -> None:
    response = client_of("admin").get(ORPHANS)
    rows = {row["launch_key"]: row for row in response.context["rows"]}
    assert {name: row["why"] for name, row in rows.items()} == {
        harness.key(1): "its attempt has ended",
        "stray-0-1": "no attempt has its launch key",
    }
    page = response.content.decode()
    assert "replica 1 of Test run" in page
    assert "pid 1" in page
    assert harness.executor.cancelled == []


def test_orphans_are_ended_after_confirmation(harness: Any) -> None:
    client = client_of("admin")
    chosen = keys(client)["stray-0-1"]
    confirmation = client.post(ORPHANS, {"_selected_action": [chosen]})
    assert "End 1 job?" in confirmation.content.decode()
    assert harness.executor.cancelled == []
    done = client.post(ORPHANS, {"_selected_action": [chosen], "confirmed": "yes"}, follow=True)
    [message] = [str(message) for message in done.context["messages"]]
    assert message == "stray-0-1: end requested from its backend"
    assert harness.executor.cancelled == ["stray-0-1"]
    ended = keys(client)[harness.key(1)]
    client.post(ORPHANS, {"_selected_action": [ended], "confirmed": "yes"})
    [event] = Event.objects.filter(run=harness.run, kind="reaper")
    assert "its attempt has ended: ended by an administrator" in event.message


def test_a_job_that_got_an_attempt_is_kept(harness: Any) -> None:
    client = client_of("admin")
    chosen = keys(client)[harness.key(1)]
    harness.replica(1).attempts.update(ended_at=None)
    response = client.post(ORPHANS, {"_selected_action": [chosen], "confirmed": "yes"}, follow=True)
    assert "The selected jobs no longer exist" in response.content.decode()
    assert harness.executor.cancelled == []


def test_an_account_that_does_not_answer_is_reported(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> Any:
        raise RetryLater("503 from the backend")

    monkeypatch.setattr(orphan_reaper, "executor_of", away)
    page = client_of("admin").get(ORPHANS).content.decode()
    assert "with the server environment could not be listed: 503 from the backend" in page
    assert "No orphans in the accounts that responded" in page


@pytest.mark.parametrize(
    ("kind", "orphans", "prices"),
    [
        ("anonymous", 302, 302),
        ("viewer", 302, 302),
        ("operator", 302, 302),
        ("staff viewer", 403, 200),
        ("admin", 200, 200),
    ],
)
def test_view_permissions(harness: Any, kind: str, orphans: int, prices: int) -> None:
    client = client_of(kind)
    assert client.get(ORPHANS).status_code == orphans
    assert client.post(ORPHANS, {"confirmed": "yes"}).status_code == (
        302 if kind == "admin" else orphans
    )
    assert client.get(PRICES).status_code == prices
    assert client.post(PRICES).status_code == (302 if prices == 302 else 405)


def test_prices_show_dates_and_overrides(settings: Any, tmp_path: Any) -> None:
    settings.HARDWARE_FILE = tmp_path / "ours.toml"
    settings.HARDWARE_FILE.write_text(
        "[modal.H100]\nprice_usd_h = 1.25\n[kubernetes.rack]\nlabel = 'Our rack'\n"
    )
    response = client_of("admin").get(PRICES)
    rows = {
        (one["table"].backend, row["hardware"].name): row["ours"]
        for one in response.context["tables"]
        for row in one["rows"]
    }
    assert (rows["modal", "H100"], rows["modal", "H200"]) == (True, False)
    assert rows["kubernetes", "rack"]
    page = response.content.decode()
    assert "$1.25" in page
    assert "Our rack" in page
    modal = next(
        one["table"] for one in response.context["tables"] if one["table"].backend == "modal"
    )
    assert f"list</a> of {modal.read_on}" in page


def test_a_token_is_seen_without_its_text_and_revoked_by_an_administrator() -> None:
    token, text = api_tokens.issue(w.person("olga", "operator"), name="laptop", scopes=["read"])
    client = client_of("admin")
    address = "/admin/runs/apitoken/"
    for page in (client.get(address), client.get(f"{address}{token.pk}/change/")):
        assert page.status_code == 200
        assert "laptop" in page.content.decode()
        assert text not in page.content.decode()
        assert token.digest not in page.content.decode()
    data = {"action": "revoke", "_selected_action": [str(token.pk)]}
    assert "Revoke 1 token?" in client.post(address, data).content.decode()
    assert ApiToken.objects.get().revoked_at is None
    client.post(address, data | {"confirmed": "yes"})
    assert ApiToken.objects.get().revoked_at is not None
    assert client.post(f"{address}{token.pk}/delete/", {"post": "yes"}).status_code == 403


@pytest.mark.parametrize("kind", ["viewer", "operator", "staff viewer"])
def test_only_administrators_manage_tokens(kind: str) -> None:
    token, _ = api_tokens.issue(w.person("olga", "operator"), name="laptop", scopes=["read"])
    data = {"action": "revoke", "_selected_action": [str(token.pk)], "confirmed": "yes"}
    client = client_of(kind)
    assert client.get("/admin/runs/apitoken/").status_code in (302, 403)
    client.post("/admin/runs/apitoken/", data)
    assert ApiToken.objects.get().revoked_at is None


def test_an_alert_is_acknowledged(harness: Any) -> None:
    now = harness.clock()
    alert = Alert.objects.create(
        run=harness.run, kind="stalled", level="error", message="m", first_at=now, opened_at=now
    )
    data = {"action": "acknowledge", "_selected_action": [str(alert.pk)]}
    client_of("staff viewer").post("/admin/runs/alert/", data)
    assert Alert.objects.get().acknowledged_at is None
    client_of("admin").post("/admin/runs/alert/", data)
    assert Alert.objects.get().acknowledged_by == User.objects.get(username="admin")
