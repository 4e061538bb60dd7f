"""Evaluations of a run's checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Path, Router

from archipelago import evaluation_rows as shared
from archipelago.rows import Done
from dashboard.access import or_404
from dashboard.api.auth import OPERATORS, run_to_operate, run_to_see
from dashboard.api.evaluation_document import Count, EvaluationDocument, Name, plan_draft
from dashboard.api.types import LARGE, Body, RunId, done, responses
from runs.actions import evaluations
from runs.queries import evaluations as evaluation_queries

router = Router(tags=["evaluations"])


class PlanName(Body):
    """``name`` is the name of an evaluation of the run."""

    name: Name


class EvaluateDocument(Body):
    """``name`` is the name of an evaluation of the run, ``round`` that of a checkpoint, by default
    the newest."""

    name: Name
    round: Count | None = None


class CancelDocument(Body):
    """The evaluation ``name`` of a round."""

    name: Name
    round: Count


@router.get(
    "/runs/{uuid:run_id}/evaluations",
    response=responses(list[shared.Evaluation], but=(409, 413)),
)
def list_evaluations(request: HttpRequest, run_id: RunId) -> Any:
    """List the evaluations of the run's checkpoints with their results, newest round first."""
    return evaluation_queries.evaluation_rows(run_to_see(request, run_id))


@router.get(
    "/runs/{uuid:run_id}/evaluations/{int:evaluation_id}/attempts",
    response=responses(list[shared.EvaluationAttempt], but=(409, 413)),
)
def list_evaluation_attempts(
    request: HttpRequest, run_id: RunId, evaluation_id: Annotated[int, Path(ge=0, le=LARGE)]
) -> Any:
    """List the backend jobs of an evaluation, with the end of their logs."""
    return or_404(evaluation_queries.attempt_rows(run_to_see(request, run_id), evaluation_id))


@router.get(
    "/runs/{uuid:run_id}/evaluation-plans",
    response=responses(list[shared.EvaluationPlan], but=(409, 413)),
)
def list_evaluation_plans(request: HttpRequest, run_id: RunId) -> Any:
    """List what is measured of the run's checkpoints."""
    return evaluation_queries.plan_rows(run_to_see(request, run_id))


@router.post(
    "/runs/{uuid:run_id}/evaluation-plans",
    auth=OPERATORS,
    response=responses(shared.EvaluationPlan),
)
def save_evaluation_plan(request: HttpRequest, run_id: RunId, body: EvaluationDocument) -> Any:
    """Evaluate the run's checkpoints from now on, or change the evaluation with this name."""
    run, user = run_to_operate(request, run_id)
    plan = evaluations.save_plan(run, plan_draft(body), actor=user)
    rows = evaluation_queries.plan_rows(run)
    return next(row for row in rows if row["name"] == plan.name)


@router.post(
    "/runs/{uuid:run_id}/evaluation-plans/remove", auth=OPERATORS, response=responses(Done)
)
def remove_evaluation_plan(request: HttpRequest, run_id: RunId, body: PlanName) -> Any:
    """Evaluate no more, and delete the list of results. Points stay in the charts."""
    run, user = run_to_operate(request, run_id)
    return done(run, evaluations.remove_plan(run, body.name, actor=user))


@router.post("/runs/{uuid:run_id}/evaluate", auth=OPERATORS, response=responses(Done))
def evaluate(request: HttpRequest, run_id: RunId, body: EvaluateDocument) -> Any:
    """Evaluate a checkpoint now, or repeat an evaluation that failed."""
    run, user = run_to_operate(request, run_id)
    return done(run, evaluations.evaluate(run, body.name, round=body.round, actor=user))


@router.post("/runs/{uuid:run_id}/evaluate/cancel", auth=OPERATORS, response=responses(Done))
def cancel_evaluation(request: HttpRequest, run_id: RunId, body: CancelDocument) -> Any:
    """Cancel a queued or running evaluation."""
    run, user = run_to_operate(request, run_id)
    return done(run, evaluations.cancel(run, body.name, body.round, actor=user))
