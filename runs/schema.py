"""Compare the migrations that the database has with those of this code, and refuse a mismatch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.core.checks import CheckMessage, Error
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader

logger = logging.getLogger(__name__)

RETRY_S = 2.0


class IncompatibleSchema(Exception):
    """This version cannot use the database, which is too new or too old.

    The message describes the remedy.
    """


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Differences between the migrations of the database and those of the code.

    Attributes:
        missing: migrations that ``manage.py migrate`` would apply.
        newer: applied migrations that this code does not have, because a newer version applied
            them.
        skipped: migrations that the database needs before this code can migrate it. Only an
            earlier version has them: this one has a squashed migration in their place.
    """

    missing: tuple[str, ...]
    newer: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def compare_schema() -> Schema:
    """Compare the migrations of the database with those of the code.

    Raises :class:`django.db.DatabaseError` if the database does not respond.
    """
    executor = MigrationExecutor(connection)
    graph = executor.loader.graph
    plan = executor.migration_plan(graph.leaf_nodes())
    replaced = {name for one in executor.loader.replacements.values() for name in one.replaces}
    applied = set(executor.loader.applied_migrations)
    own = {app for app, _ in graph.nodes}
    unknown = {key for key in applied - set(graph.nodes) - replaced if key[0] in own}
    return Schema(
        missing=tuple(f"{one.app_label}.{one.name}" for one, _ in plan),
        newer=tuple(sorted(f"{app}.{name}" for app, name in unknown)),
        skipped=_skipped(executor.loader),
    )


def _skipped(loader: MigrationLoader) -> tuple[str, ...]:
    """Replaced migrations that the database lacks although it has others of the same squash.

    Django applies a squashed migration only to a database that has none of those it replaces. It
    ignores a database that has some of them.
    """
    result: list[str] = []
    for migration in loader.replacements.values():
        lacking = [key for key in migration.replaces if key not in loader.applied_migrations]
        on_disk = any(key in loader.disk_migrations for key in lacking)
        if 0 < len(lacking) < len(migration.replaces) and not on_disk:
            result += [f"{app}.{name}" for app, name in lacking]
    return tuple(result)


def refuse_newer(schema: Schema) -> None:
    """Raise :class:`IncompatibleSchema` if this code cannot use or migrate the database."""
    if schema.newer:
        raise IncompatibleSchema(
            "the database was used by a newer version: expected only migrations that this "
            f"version has, found {schema.newer[-1]}. Start that version again, or restore a "
            "backup that this version has made."
        )
    if schema.skipped:
        raise IncompatibleSchema(
            f"the database is too old: expected every migration up to {schema.skipped[-1]}, "
            f"found that {schema.skipped[0]} is missing. Run manage.py migrate of the last "
            "version that has these migrations, then migrate again with this version."
        )


def check_database(*, databases: Sequence[str] | None = None, **options: Any) -> list[CheckMessage]:
    """System check: an error if ``manage.py migrate`` cannot bring the database up to date."""
    if connection.alias not in (databases or ()):
        return []
    try:
        refuse_newer(compare_schema())
    except DatabaseError:
        return []
    except IncompatibleSchema as error:
        return [Error(str(error), id="runs.E001")]
    return []


def wait_for_schema(*, sleep: Callable[[float], object] = time.sleep) -> None:
    """Return once the database has every migration of this code.

    Return also if the database does not respond: workers retry the connection themselves.

    Raises :class:`IncompatibleSchema`.
    """
    reported = False
    try:
        while True:
            schema = compare_schema()
            refuse_newer(schema)
            if not schema.missing:
                return
            if not reported:
                logger.warning(
                    "waiting for manage.py migrate: the database lacks %d migrations, the first "
                    "is %s",
                    len(schema.missing),
                    schema.missing[0],
                )
                reported = True
            sleep(RETRY_S)
    except DatabaseError:
        return
    finally:
        connection.close()  # a process that is forked later must not share the connection
