"""Conditions that Django does not have."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from django.db.models import F, Lookup


class AmongIds(Lookup):
    """A column of UUIDs has one of some values.

    The same as ``__in``, with one parameter: Django prepares each value of a list in many calls,
    which takes longer than the queries of a page of runs.
    """

    lookup_name = "among_ids"
    prepare_rhs = False

    def __init__(self, column: str, ids: Sequence[uuid.UUID]) -> None:
        super().__init__(F(column), list(ids))

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        column, values = self.process_lhs(compiler, connection)
        return f"{column} = ANY(%s)", [*values, self.rhs]

    def as_sqlite(self, compiler: Any, connection: Any) -> Any:
        column, values = self.process_lhs(compiler, connection)
        sql = f"{column} IN (SELECT value FROM json_each(%s))"  # noqa: S608 -- Django's own column
        return sql, [*values, json.dumps([pk.hex for pk in self.rhs])]
