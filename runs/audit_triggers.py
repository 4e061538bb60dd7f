"""Database triggers that make the audit log append-only, for SQLite and PostgreSQL."""

# All statements are built from constants.
# ruff: noqa: S608

from __future__ import annotations

from typing import Any

TABLE = "runs_auditentry"
MESSAGE = "the audit log is append-only"

_SQLITE = (
    *(
        f"CREATE TRIGGER {TABLE}_no_{verb.lower()} BEFORE {verb} ON {TABLE} "
        f"BEGIN SELECT RAISE(ABORT, '{MESSAGE}'); END"
        for verb in ("UPDATE", "DELETE")
    ),
    # SQLite fires no DELETE trigger for a row that INSERT OR REPLACE removes
    # (https://www.sqlite.org/lang_conflict.html).
    f"CREATE TRIGGER IF NOT EXISTS {TABLE}_no_replace BEFORE INSERT ON {TABLE} "
    f"WHEN EXISTS (SELECT 1 FROM {TABLE} AS old "
    f"WHERE old.id = NEW.id OR old.hash = NEW.hash) "
    f"BEGIN SELECT RAISE(ABORT, '{MESSAGE}'); END",
)
_POSTGRESQL = (
    f"CREATE OR REPLACE FUNCTION {TABLE}_refuse() RETURNS trigger AS $$ "
    f"BEGIN RAISE EXCEPTION '{MESSAGE}'; END; $$ LANGUAGE plpgsql",
    f"CREATE TRIGGER {TABLE}_no_change BEFORE UPDATE OR DELETE ON {TABLE} "
    f"FOR EACH ROW EXECUTE FUNCTION {TABLE}_refuse()",
    f"CREATE TRIGGER {TABLE}_no_truncate BEFORE TRUNCATE ON {TABLE} "
    f"FOR EACH STATEMENT EXECUTE FUNCTION {TABLE}_refuse()",
)
_DROP = {
    "sqlite": tuple(
        f"DROP TRIGGER IF EXISTS {TABLE}_no_{verb}" for verb in ("update", "delete", "replace")
    ),
    "postgresql": tuple(
        f"DROP TRIGGER IF EXISTS {TABLE}_no_{name} ON {TABLE}" for name in ("change", "truncate")
    ),
}


def install(connection: Any) -> None:
    statements = {"sqlite": _SQLITE, "postgresql": _POSTGRESQL}[connection.vendor]
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def remove(connection: Any) -> None:
    with connection.cursor() as cursor:
        for statement in _DROP[connection.vendor]:
            cursor.execute(statement)
