"""Insert or update many rows in one statement, on SQLite and PostgreSQL.

Django's ``bulk_update`` builds one CASE expression per row, which took most of an ingest tick. Both
databases accept ``UPDATE ... FROM (VALUES ...)`` (SQLite since 3.33), and both name the columns of
VALUES column1, column2 and so on. Table and column names come from our models, never from input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connection, connections, models
from django.db.models import Field, Model, Q

ROWS = 500
"""Rows per statement. SQLite accepts 32,766 values."""


def parts(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Split rows into lists that fit one statement."""
    all_rows = list(rows)
    for first in range(0, len(all_rows), ROWS):
        yield all_rows[first : first + ROWS]


def values(rows: Sequence[Sequence[Any]]) -> tuple[str, list[Any]]:
    """A ``VALUES`` clause and its parameters."""
    row = f"({', '.join(['%s'] * len(rows[0]))})"
    return f"VALUES {', '.join([row] * len(rows))}", [value for row in rows for value in row]


def update_row(row: Model, where: Q | None = None, /, **fields: Any) -> bool:
    """Set fields of one row, and of the instance, unless the row does not meet ``where``.

    Writes no other field. Returns whether the row was updated.
    """
    rows = type(row)._default_manager.filter(where or Q(), pk=row.pk)
    if not rows.update(**fields):
        return False
    for name, value in fields.items():
        setattr(row, name, value)
    return True


def update_rows(
    model: type[Model], names: Sequence[str], rows: Iterable[tuple[Any, Sequence[Any]]]
) -> None:
    """Set the fields ``names`` of ``rows``, each (primary key, values)."""
    fields = [_field(model, name) for name in names]
    quote = connection.ops.quote_name
    # Without the cast, PostgreSQL takes a column of NULLs for text.
    settings = ", ".join(
        f"{quote(field.column)} = CAST(v.column{number} AS {field.cast_db_type(connection)})"
        for number, field in enumerate(fields, 2)
    )
    table, key = quote(model._meta.db_table), quote(_field(model, "pk").column)
    for part in parts(rows):
        sql, parameters = values([(pk, *_prepared(fields, row)) for pk, row in part])
        where = f"{table}.{key} = v.column1"
        if connection.vendor == "postgresql":  # otherwise its planner hashes the whole table
            where += f" AND {table}.{key} = ANY(%s)"
            parameters.append([pk for pk, _ in part])
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {table} SET {settings} FROM ({sql}) AS v WHERE {where}",  # noqa: S608
                parameters,
            )


def insert_rows(model: type[Model], names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Insert rows with values for the fields ``names``."""
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
    own = connections[DEFAULT_DB_ALIAS]  # ``connection`` looks it up for each of its attributes
    plain = _plain_of(tuple(fields))
    return [
        value if type(value) in kinds else field.get_db_prep_save(value, own)
        for field, kinds, value in zip(fields, plain, row, strict=True)
    ]


@lru_cache(maxsize=64)
def _plain_of(fields: tuple[Field[Any, Any], ...]) -> tuple[frozenset[type], ...]:
    """The types of each field's values that both databases store as they are. Django's conversion
    of numbers, texts and NULL changes nothing, and would take most of the time of a large
    insert."""
    return tuple(map(_plain, fields))


def _plain(field: Field[Any, Any]) -> frozenset[type]:
    stored = field.target_field if isinstance(field, models.ForeignKey) else field
    if type(stored) is models.DateTimeField:
        return frozenset({type(None)})
    kind = _KINDS.get(type(stored))
    return frozenset({kind, type(None)} if kind else ())


_KINDS: dict[type[Field[Any, Any]], type] = {
    models.BigAutoField: int,
    models.FloatField: float,
    models.IntegerField: int,
    models.BigIntegerField: int,
    models.PositiveIntegerField: int,
    models.PositiveBigIntegerField: int,
    models.CharField: str,
    models.TextField: str,
}
