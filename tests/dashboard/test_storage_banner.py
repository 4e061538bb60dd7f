"""Pages and ``/readyz`` show that the database is not writable or the disk is full."""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.utils import timezone

from runs import disk, live_stream
from runs.backends import storage_health
from runs.tasks import reconcile_active
from tests.browser import seed
from tests.dashboard.page_harness import client_for

pytestmark = pytest.mark.django_db
LOCKED = "another process holds its write lock"


@pytest.fixture
def broker(valkey: str, settings: Any) -> Any:
    settings.REDIS_URL = valkey
    live_stream.client().delete(storage_health.DATABASE)
    yield live_stream.client()
    live_stream.client().delete(storage_health.DATABASE)


def refuse_writes(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    if not sql.startswith("UPDATE"):
        return execute(sql, params, many, context)
    cause = sqlite3.OperationalError("database is locked")
    cause.sqlite_errorcode = sqlite3.SQLITE_BUSY
    raise OperationalError(str(cause)) from cause


def shown(run: Any) -> list[bool]:
    """Whether list, run page and replica page show the banner."""
    client = client_for("admin", run.owner)
    paths = ("/", f"/runs/{run.pk}/", f"/runs/{run.pk}/replicas/0/")
    pages = [client.get(path).content.decode() for path in paths]
    return ["Nothing new is saved" in page for page in pages]


@pytest.mark.processes
def test_an_unwritable_database_is_shown_until_it_recovers(broker: Any) -> None:
    run = seed.run(seed.user("owner", "operator"), committed=1, replicas=1)
    with connection.execute_wrapper(refuse_writes):
        reconcile_active()
    database = Client().get("/readyz").json()["database"]
    assert database.startswith("can't be written since ") and database.endswith(LOCKED)
    assert Client().get("/readyz").status_code == 503
    assert shown(run) == [True, True, True]
    reconcile_active()
    assert Client().get("/readyz").json()["database"] == "ok"
    assert shown(run) == [False, False, False]


@pytest.mark.processes
def test_the_banner_shows_the_time_of_the_first_failure(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = timezone.now()
    with connection.execute_wrapper(refuse_writes):
        for minutes in (0, 3):
            at = began + timedelta(minutes=minutes)
            monkeypatch.setattr("runs.backends.storage_health.timezone.now", lambda at=at: at)
            storage_health.probe_database()
    assert f"since {began:%H:%M:%S} UTC: {LOCKED}" in storage_health.database_problem()


def test_a_full_disk_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    run = seed.run(seed.user("owner", "operator"), committed=1, replicas=1)
    assert shown(run) == [False, False, False]
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 3_000_000)
    assert shown(run) == [True, True, True]
    assert storage_health.storage_problem() == "The server's disk is full: 3 MB free."


def test_a_probe_changes_nothing_and_needs_no_broker() -> None:
    storage_health.probe_database()
    assert storage_health.database_problem() == ""
