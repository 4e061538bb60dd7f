"""Annotations whose SQL is compiled once per process."""

from __future__ import annotations

from typing import Any

from django.db.models.expressions import ExpressionWrapper


class CompiledOnce(ExpressionWrapper):  # type: ignore[type-arg]  # no generic at run time
    """An expression without values that change, for a query that is built once and sent often.

    Compiling the subqueries of the runs list takes longer than executing them. Copies share the
    SQL, except those whose sources were replaced, e.g. because the query became a subquery in
    which its table has another alias.
    """

    def __init__(self, expression: Any, output_field: Any) -> None:
        super().__init__(expression, output_field)
        self._sql: dict[str, tuple[str, tuple[Any, ...]]] = {}

    def set_source_expressions(self, exprs: Any) -> None:
        super().set_source_expressions(exprs)
        self._sql = {}

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        if connection.vendor not in self._sql:
            sql, values = compiler.compile(self.expression)
            self._sql[connection.vendor] = sql, tuple(values)
        return self._sql[connection.vendor]
