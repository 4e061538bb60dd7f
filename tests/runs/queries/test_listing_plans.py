"""An index serves every order of the list, in both directions, on either database."""

from __future__ import annotations

import pytest
from django.db import connection

from runs.models import Run
from runs.queries.listing import SORTS, Order, page

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("name", sorted(SORTS))
@pytest.mark.parametrize("sign", ["", "-"])
def test_page_needs_no_sort(name: str, sign: str) -> None:
    order = Order.of(f"{sign}{name}")
    assert str(order) == f"{sign}{name}"
    plans: list[str] = []

    def explain(execute, sql, params, many, context):  # type: ignore[no-untyped-def]
        statement = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
        with connection.cursor() as cursor:
            # For a few rows, sorting is cheaper than an index.
            if connection.vendor == "postgresql":
                cursor.cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
            cursor.cursor.execute(f"{statement} {sql}", params)
            plans.extend(str(row[-1]) for row in cursor.fetchall())
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        page(Run.objects.filter(archived_at=None), order)
    assert plans
    assert not [line for line in plans if "Sort" in line or "B-TREE" in line]
