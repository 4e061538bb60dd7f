"""Evaluations of a run as rows of pages and the API."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, Sum

from archipelago import evaluation_rows as rows
from diloco.protocol.evaluation import EvaluationSpec
from runs.json_values import finite, mapping, row_of
from runs.models import Evaluation, EvaluationPlan, MetricBlock, Run

SHOWN = 500
SERIES = "eval-"
"""Begins the names of series of results; no other series of a run does."""


def series_name(plan: str, metric: str) -> str:
    """The run's series of a metric, for charts, exports, trackers and the API."""
    return f"{SERIES}{plan}-{metric}"


def plan_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of the plans, oldest first. Two queries."""
    names = sorted(
        MetricBlock.objects.filter(run=run, replica=None, level=0, series__startswith=SERIES)
        .order_by()
        .values_list("series", flat=True)
        .distinct()
    )
    return [plan_row(plan, names) for plan in run.evaluation_plans.select_related("credential")]


def plan_row(plan: EvaluationPlan, series: list[str]) -> dict[str, Any]:
    spec = EvaluationSpec.from_dict(mapping(plan.spec))
    return row_of(
        rows.EvaluationPlan,
        plan,
        data=spec.data,
        tokens=spec.tokens,
        tasks=list(spec.tasks),
        examples=spec.examples,
        credential=plan.credential.name if plan.credential else "",
        series=[name for name in series if name.startswith(series_name(plan.name, ""))],
    )


def evaluation_rows(run: Run, *, limit: int = SHOWN) -> list[dict[str, Any]]:
    """Rows of the evaluations of a run, newest round first."""
    found = Evaluation.objects.filter(run=run).select_related("plan")
    annotated = found.annotate(count=Count("attempts"), cost=Sum("attempts__cost_usd"))
    return [_row(row) for row in annotated[:limit]]


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


def attempt_rows(run: Run, evaluation_id: int) -> list[dict[str, Any]] | None:
    """Rows of the attempts of an evaluation, oldest first; None if the run has no such one."""
    evaluation = Evaluation.objects.filter(run=run, pk=evaluation_id).first()
    if evaluation is None:
        return None
    return [row_of(rows.EvaluationAttempt, attempt) for attempt in evaluation.attempts.all()]
