"""Workers do not work on a database of another version: they wait for a migration, or refuse."""

from __future__ import annotations

import logging

import pytest
from django.db import OperationalError

from runs import schema
from runs.schema import NewerSchema, Schema, wait_for_schema

READY = Schema(missing=(), newer=())
OLD = Schema(missing=("runs.0020_a", "runs.0021_b"), newer=())
NEWER = Schema(missing=(), newer=("runs.0099_z",))


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> list[Schema | Exception]:
    """What the database has, one look after the other."""
    states: list[Schema | Exception] = []

    def look() -> Schema:
        state = states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    monkeypatch.setattr(schema, "compare_schema", look)
    monkeypatch.setattr("runs.schema.connection.close", lambda: None)
    return states


def test_it_waits_until_the_database_is_migrated(
    database: list[Schema | Exception], caplog: pytest.LogCaptureFixture
) -> None:
    database += [OLD, OLD, READY]
    waits: list[float] = []
    with caplog.at_level(logging.WARNING):
        wait_for_schema(sleep=waits.append)
    assert (len(waits), database) == (2, [])
    [line] = caplog.messages
    assert line == (
        "waiting for manage.py migrate: the database lacks 2 migrations, the first is runs.0020_a"
    )


@pytest.mark.parametrize("before", [[], [OLD]])
def test_a_database_of_a_newer_version_is_refused(
    database: list[Schema | Exception], before: list[Schema]
) -> None:
    database += [*before, NEWER]
    with pytest.raises(NewerSchema, match=r"newer version: .* found runs\.0099_z"):
        wait_for_schema(sleep=lambda seconds: None)


def test_a_database_that_is_away_is_waited_for_by_the_worker_itself(
    database: list[Schema | Exception],
) -> None:
    database.append(OperationalError("connection refused"))
    wait_for_schema()
    assert not database


def test_a_worker_ends_with_the_reason(
    database: list[Schema | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard import celery

    monkeypatch.setattr("dashboard.checks.at_start", lambda: None)
    monkeypatch.setattr("dashboard.security.private_files.set_umask", lambda: None)
    database.append(NEWER)
    with pytest.raises(SystemExit, match=r"archipelago: the database was used by a newer version"):
        celery._check()
