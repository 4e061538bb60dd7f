"""The squashed migration: databases that it accepts, and those that are refused."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder

from runs.backends.health import readiness
from runs.schema import IncompatibleSchema, check_database, compare_schema, refuse_newer

pytestmark = pytest.mark.django_db

LAST = "0025_waits_and_earlier_costs"
SQUASHED = f"0001_squashed_{LAST}"


def test_a_database_with_all_replaced_migrations_needs_nothing() -> None:
    MigrationRecorder(connection).record_unapplied("runs", SQUASHED)
    schema = compare_schema()
    assert (schema.missing, schema.newer, schema.skipped) == ((), (), ())
    assert check_database(databases=["default"]) == []


def test_a_database_with_some_replaced_migrations_is_refused() -> None:
    recorder = MigrationRecorder(connection)
    for name in (SQUASHED, LAST, "0024_audit_replace"):
        recorder.record_unapplied("runs", name)
    schema = compare_schema()
    assert schema.skipped == ("runs.0024_audit_replace", f"runs.{LAST}")
    with pytest.raises(
        IncompatibleSchema, match=r"too old: .* up to runs\.0025.* runs\.0024_audit"
    ):
        refuse_newer(schema)
    with pytest.raises(SystemCheckError, match=r"runs\.E001.* manage\.py migrate of the last"):
        call_command("migrate", skip_checks=False)
    assert readiness()["database"] == "has to be migrated"


def test_a_fresh_database_records_the_replaced_migrations() -> None:
    applied = MigrationRecorder(connection).applied_migrations()
    assert {("runs", SQUASHED), ("runs", "0001_initial"), ("runs", LAST)} <= set(applied)
