"""Evaluations of a run as rows of pages and the API."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, Sum

from archipelago import evaluation_rows as rows
from diloco.protocol.evaluation import LOSS, PERPLEXITY, EvaluationSpec
from runs.json_values import finite, mapping, row_of
from runs.metrics.evaluation_series import PREFIX, plan_part, series_name
from runs.models import Evaluation, EvaluationAttempt, EvaluationPlan, MetricBlock, Run

SHOWN = 500
ROWS_SHOWN, COLUMNS, CHARTS = 100, 12, 12
"""Limits of a plan on the page."""
LOGS_SHOWN, LOG_CHARS = 20, 4000


def plan_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of the plans, oldest first. Two queries."""
    names = sorted(
        MetricBlock.objects.filter(run=run, replica=None, level=0, series__startswith=PREFIX)
        .order_by()
        .values_list("series", flat=True)
        .distinct()
    )
    plans = run.evaluation_plans.filter(enabled=True).select_related("credential")
    return [plan_row(plan, names) for plan in plans]


def plan_row(plan: EvaluationPlan, series: list[str]) -> dict[str, Any]:
    spec = EvaluationSpec.from_dict(mapping(plan.spec))
    own = plan_part(series_name(plan.name, ""))
    return row_of(
        rows.EvaluationPlan,
        plan,
        data=spec.data,
        tokens=spec.tokens,
        tasks=list(spec.tasks),
        examples=spec.examples,
        credential=plan.credential.name if plan.credential else "",
        series=sorted(
            (name for name in series if plan_part(name) == own),
            key=lambda name: (name.rpartition("-")[2] not in (LOSS, PERPLEXITY), name),
        ),
    )


def evaluation_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of the evaluations of a run, newest round first."""
    found = Evaluation.objects.filter(run=run, plan__enabled=True).select_related("plan")
    newest = found.order_by("-round", "plan_id")
    annotated = newest.annotate(count=Count("attempts"), cost=Sum("attempts__cost_usd"))
    return [_row(row) for row in annotated[:SHOWN]]


def _row(row: Any) -> dict[str, Any]:
    metrics = [
        {"name": str(name), "value": finite(value), "stderr": finite(stderr)}
        for name, (value, stderr) in mapping(row.metrics).items()
    ]
    return row_of(
        rows.Evaluation,
        row,
        plan=row.plan.name,
        metrics=metrics,
        attempts=row.count,
        cost_usd=finite(row.cost),
    )


def plan_named(run: Run, name: str) -> EvaluationPlan | None:
    return EvaluationPlan.objects.filter(run=run, name=name, enabled=True).first()


def tables(run: Run) -> list[dict[str, Any]]:
    """For each plan its row, the names of its ``metrics``, its newest ``rows`` with one cell for
    each metric, and its ``charts``. Four queries."""
    logs = dict(
        EvaluationAttempt.objects.filter(
            evaluation__run=run, evaluation__state=Evaluation.State.FAILED
        )
        .order_by("number")
        .values_list("evaluation_id", "log")[:LOGS_SHOWN]
    )
    by_plan: dict[str, list[dict[str, Any]]] = {}
    for row in evaluation_rows(run):
        by_plan.setdefault(row["plan"], []).append(row)
    return [_table(plan, by_plan.get(plan["name"], []), logs) for plan in plan_rows(run)]


def _table(
    plan: dict[str, Any], of_plan: list[dict[str, Any]], logs: dict[int, str]
) -> dict[str, Any]:
    shown = of_plan[:ROWS_SHOWN]
    names = list(dict.fromkeys(m["name"] for row in shown for m in row["metrics"]))[:COLUMNS]
    prefix = series_name(plan["name"], "")
    return {
        "plan": plan,
        "metrics": names,
        "rows": [
            {
                **row,
                "cells": [
                    next((m for m in row["metrics"] if m["name"] == name), None) for name in names
                ],
                "log": logs.get(row["id"], "")[-LOG_CHARS:],
                "is_active": row["state"] in Evaluation.ACTIVE,
                "is_repeatable": row["state"] in ("failed", "cancelled", "skipped"),
            }
            for row in shown
        ],
        "more": len(of_plan) - len(shown),
        "charts": [
            {
                "id": f"m:{name}",
                "title": f"{plan['name']}: {name.removeprefix(prefix).replace('_', ' ')}",
            }
            for name in plan["series"][:CHARTS]
        ],
    }


def attempt_rows(run: Run, evaluation_id: int) -> list[dict[str, Any]] | None:
    """Rows of the attempts of an evaluation, oldest first; None if the run has no such one."""
    evaluation = Evaluation.objects.filter(run=run, pk=evaluation_id).first()
    if evaluation is None:
        return None
    return [row_of(rows.EvaluationAttempt, attempt) for attempt in evaluation.attempts.all()]
