"""Many rows written or changed in one statement, on SQLite and on PostgreSQL.

``bulk_update`` makes a CASE of every row and resolves it term by term: in a tick of the ingest that
was most of the time. ``UPDATE ... FROM (VALUES ...)`` is read alike by both databases (SQLite from
3.33 on), and both name the columns of VALUES column1, column2 and so on. Names of tables and
columns are those of our own models, never text from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.db import connection
from django.db.models import Field, Model

ROWS = 500
"""Of one statement; SQLite takes 32,766 values."""


def parts(rows: Iterable[Any]) -> Iterator[list[Any]]:
    found = list(rows)
    for first in range(0, len(found), ROWS):
        yield found[first : first + ROWS]


def values(rows: Sequence[Sequence[Any]]) -> tuple[str, list[Any]]:
    """``VALUES`` and its parameters."""
    row = f"({', '.join(['%s'] * len(rows[0]))})"
    return f"VALUES {', '.join([row] * len(rows))}", [value for row in rows for value in row]


def update_rows(
    model: type[Model], names: Sequence[str], rows: Iterable[tuple[Any, Sequence[Any]]]
) -> None:
    """Set the fields ``names``; ``rows`` are (primary key, values)."""
    fields = [_field(model, name) for name in names]
    quote = connection.ops.quote_name
    # Without the cast a column of NULLs is one of text to PostgreSQL.
    settings = ", ".join(
        f"{quote(field.column)} = CAST(v.column{number} AS {field.cast_db_type(connection)})"
        for number, field in enumerate(fields, 2)
    )
    table, key = quote(model._meta.db_table), quote(_field(model, "pk").column)
    for part in parts(rows):
        sql, parameters = values([(pk, *_prepared(fields, row)) for pk, row in part])
        where = f"{table}.{key} = v.column1"
        if connection.vendor == "postgresql":  # its planner would rather hash the whole table
            where += f" AND {table}.{key} = ANY(%s)"
            parameters.append([pk for pk, _ in part])
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {table} SET {settings} FROM ({sql}) AS v WHERE {where}",  # noqa: S608
                parameters,
            )


def insert_rows(model: type[Model], names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    fields = [_field(model, name) for name in names]
    quote = connection.ops.quote_name
    columns = ", ".join(quote(field.column) for field in fields)
    for part in parts(rows):
        sql, parameters = values([_prepared(fields, row) for row in part])
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {quote(model._meta.db_table)} ({columns}) {sql}",
                parameters,
            )


def _field(model: type[Model], name: str) -> Any:
    return model._meta.pk if name == "pk" else model._meta.get_field(name)


def _prepared(fields: Sequence[Field[Any, Any]], row: Sequence[Any]) -> list[Any]:
    return [
        field.get_db_prep_save(value, connection) for field, value in zip(fields, row, strict=True)
    ]
