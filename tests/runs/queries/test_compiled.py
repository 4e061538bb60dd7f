"""Annotations that are compiled once: the same SQL, also where the table has another alias."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Count, Exists, IntegerField, OuterRef, Subquery
from django.db.models.sql.compiler import SQLCompiler

from runs.models import Replica, Run
from runs.queries.compiled import CompiledOnce
from tests.browser import seed
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db


def counts() -> Any:
    replicas = Replica.objects.filter(run=OuterRef("pk"), number__gt=0).order_by()
    return Subquery(replicas.values("run").annotate(n=Count("pk")).values("n"))


def test_the_sql_is_that_of_the_expression_and_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Run.objects.annotate(others=CompiledOnce(counts(), IntegerField()))
    expected = str(Run.objects.annotate(others=counts()).filter(name="a").query)
    compiled: list[object] = []
    compile_ = SQLCompiler.compile
    monkeypatch.setattr(
        SQLCompiler, "compile", lambda self, node: (compiled.append(node), compile_(self, node))[1]
    )
    assert str(runs.filter(name="a").query) == expected
    assert any(isinstance(node, Subquery) for node in compiled)
    compiled.clear()
    assert str(runs.filter(name="a").query) == expected
    assert not any(isinstance(node, Subquery) for node in compiled)


def test_a_query_that_became_a_subquery_counts_its_own_rows() -> None:
    owner = w.person("olga", "operator")
    few, many = (seed.run(owner, committed=0, replicas=n) for n in (2, 4))
    runs = Run.objects.annotate(others=CompiledOnce(counts(), IntegerField()))
    assert {run.pk: run.others for run in runs} == {few.pk: 1, many.pk: 3}
    # If it counted the rows of the outer query, only ``many`` would match.
    assert set(Run.objects.filter(Exists(runs.filter(others=3)))) == {few, many}
