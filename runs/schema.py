"""Whether the database and this code agree about the tables."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connection
from django.db.migrations.executor import MigrationExecutor


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
