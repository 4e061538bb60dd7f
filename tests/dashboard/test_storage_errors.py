"""Error pages for a full disk, a busy database and an unreachable database."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from psycopg import errors as postgres

from runs.queries import selectors
from runs.storage_errors import StorageTrouble, storage_trouble
from tests.browser import seed
from tests.dashboard.page_harness import client_for

FULL, BUSY, AWAY = StorageTrouble.DISK_FULL, StorageTrouble.BUSY, StorageTrouble.AWAY


def of_django(cause: Exception) -> OperationalError:
    error = OperationalError(str(cause))
    error.__cause__ = cause
    return error


def full_sqlite(folder: Path) -> sqlite3.Error:
    """The error that SQLite raises when its file cannot grow."""
    with sqlite3.connect(folder / "db") as database:
        database.execute("CREATE TABLE t (x)")
        database.execute("PRAGMA max_page_count = 1")
        with pytest.raises(sqlite3.Error) as caught:
            database.execute("INSERT INTO t VALUES (?)", ("x" * 100_000,))
    return caught.value


def locked_sqlite(folder: Path) -> sqlite3.Error:
    first, second = (sqlite3.connect(folder / "db", timeout=0) for _ in range(2))
    first.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.Error) as caught:
        second.execute("BEGIN IMMEDIATE")
    for one in (first, second):
        one.close()
    return caught.value


def test_each_storage_failure_is_recognised(tmp_path: Path) -> None:
    assert storage_trouble(of_django(full_sqlite(tmp_path))) is FULL
    assert storage_trouble(of_django(locked_sqlite(tmp_path))) is BUSY
    assert storage_trouble(of_django(postgres.DiskFull())) is FULL
    assert storage_trouble(of_django(postgres.DeadlockDetected())) is BUSY
    assert storage_trouble(of_django(postgres.OperationalError("connection refused"))) is AWAY
    assert storage_trouble(OSError(errno.ENOSPC, "No space left on device")) is FULL
    wrapped = RuntimeError("while saving")
    wrapped.__cause__ = of_django(postgres.DiskFull())
    assert storage_trouble(wrapped) is FULL


def test_other_errors_are_not_storage_failures() -> None:
    assert storage_trouble(None) is None
    assert storage_trouble(ValueError("x")) is None
    assert storage_trouble(of_django(postgres.UndefinedTable())) is None
    assert storage_trouble(OSError(errno.ENOENT, "x")) is None


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("cause", "status", "text"),
    [
        (postgres.DiskFull(), 507, "The server&#x27;s disk is full"),
        (postgres.LockNotAvailable(), 503, "The database is busy"),
        (postgres.OperationalError("gone"), 503, "The database can&#x27;t be reached"),
    ],
)
def test_pages_and_api_explain_storage_failures(
    cause: Exception, status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_for("viewer", seed.user("owner", "operator"))
    client.raise_request_exception = False

    def fail(*args: Any, **more: Any) -> None:
        raise of_django(cause)

    for name in ("runs_for", "visible_runs"):
        monkeypatch.setattr(selectors, name, fail)
    for path in ("/runs/00000000-0000-0000-0000-000000000000/", "/api/runs"):
        response = client.get(path)
        assert response.status_code == status, path
        assert int(response["Retry-After"]) > 0
        shown = response.content.decode()
        assert (text in shown) or (text.replace("&#x27;", "'") in shown)
        assert "Nothing was saved" in shown


@pytest.mark.django_db
def test_other_errors_show_the_usual_page(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_for("viewer", seed.user("owner", "operator"))
    client.raise_request_exception = False

    def fail(*args: Any, **more: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(selectors, "runs_for", fail)
    response = client.get("/runs/00000000-0000-0000-0000-000000000000/")
    assert response.status_code == 500
    assert "broken" not in response.content.decode()
