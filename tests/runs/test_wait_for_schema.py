"""Workers wait for missing migrations, and refuse the database of a newer version."""

from __future__ import annotations

import logging

import pytest
from django.db import OperationalError

from runs import schema
from runs.schema import IncompatibleSchema, Schema, wait_for_schema

READY = Schema(missing=(), newer=())
OLD = Schema(missing=("runs.0020_a", "runs.0021_b"), newer=())
NEWER = Schema(missing=(), newer=("runs.0099_z",))


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> list[Schema | Exception]:
    """Results of consecutive schema comparisons."""
    states: list[Schema | Exception] = []

    def next_state() -> Schema:
        state = states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    monkeypatch.setattr(schema, "compare_schema", next_state)
    monkeypatch.setattr("runs.schema.connection.close", lambda: None)
    return states


def test_worker_waits_until_the_database_is_migrated(
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
    with pytest.raises(IncompatibleSchema, match=r"newer version: .* found runs\.0099_z"):
        wait_for_schema(sleep=lambda seconds: None)


def test_unavailable_database_does_not_block_the_start(
    database: list[Schema | Exception],
) -> None:
    database.append(OperationalError("connection refused"))
    wait_for_schema()
    assert not database


def test_worker_exits_with_the_reason(
    database: list[Schema | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard import celery

    monkeypatch.setattr("dashboard.checks.at_start", lambda: None)
    monkeypatch.setattr("dashboard.security.private_files.set_umask", lambda: None)
    database.append(NEWER)
    with pytest.raises(SystemExit, match=r"archipelago: the database was used by a newer version"):
        celery._check()
