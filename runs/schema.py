"""Whether the database and this code agree about the tables."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor

logger = logging.getLogger(__name__)

RETRY_S = 2.0


class NewerSchema(Exception):
    """The database was migrated by a newer version; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """``missing``: migrations that have to be applied. ``newer``: applied migrations that this code
    does not have, because a newer version of it was here before."""

    missing: tuple[str, ...]
    newer: tuple[str, ...]


def compare_schema() -> Schema:
    """Compare the migrations of the database with those of the code.

    Raises :class:`django.db.DatabaseError` when the database does not answer.
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
    )


def refuse_newer(schema: Schema) -> None:
    """Raise :class:`NewerSchema` if this code does not know all of the database."""
    if schema.newer:
        raise NewerSchema(
            "the database was used by a newer version: expected only migrations that this "
            f"version has, found {schema.newer[-1]}. Start that version again, or restore a "
            "backup that this version has made."
        )


def wait_for_schema(*, sleep: Callable[[float], object] = time.sleep) -> None:
    """Return once the database has every migration of this code, or does not answer: workers wait
    for that by themselves.

    Raises :class:`NewerSchema`.
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
                    len(schema.missing), schema.missing[0],
                )  # fmt: skip
                reported = True
            sleep(RETRY_S)
    except DatabaseError:
        return
    finally:
        connection.close()  # processes that are forked later must not share it
