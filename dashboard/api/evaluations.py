"""Evaluations of a run's checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Path, Router
from pydantic import Field

from archipelago import evaluation_rows as shared
from archipelago.rows import Done
from dashboard.access import or_404
from dashboard.api.auth import OPERATORS, run_to_operate, run_to_see
from dashboard.api.types import LARGE, NO_NUL, SMALL, Body, RunId, done, responses
from diloco.protocol.evaluation import DATA_CHARS, MOST_TASKS, TOKENS
from runs.actions import evaluations
from runs.actions.evaluations import NAME_CHARS, PlanDraft
from runs.queries import evaluations as evaluation_queries

router = Router(tags=["evaluations"])

Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS, pattern=NO_NUL)]
Text = Annotated[str, Field(max_length=80, pattern=NO_NUL)]
Count = Annotated[int, Field(ge=0, le=SMALL)]


class PlanDocument(Body):
    """Measurement of the run's checkpoints. ``credential`` is the name of a credential of the
    backend, '' for the server's environment."""

    name: Name
    data: Annotated[str, Field(max_length=DATA_CHARS, pattern=NO_NUL)] = ""
    tokens: Count = TOKENS
    tasks: Annotated[list[Text], Field(max_length=MOST_TASKS)] = Field(default_factory=list)
    examples: Count = 0
    every: Count = 1
    backend: Annotated[str, Field(max_length=32, pattern=NO_NUL)] = "local"
    hardware: Annotated[str, Field(max_length=64, pattern=NO_NUL)] = "cpu"
    credential: Text = ""
    timeout_s: Count = 3600
    max_attempts: Count = 3


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
def save_evaluation_plan(request: HttpRequest, run_id: RunId, body: PlanDocument) -> Any:
    """Evaluate the run's checkpoints from now on, or change the evaluation with this name."""
    run, user = run_to_operate(request, run_id)
    draft = PlanDraft(
        name=body.name,
        spec=evaluations.spec_of(
            data=body.data, tokens=body.tokens, tasks=tuple(body.tasks), examples=body.examples
        ),
        every=body.every,
        backend=body.backend,
        hardware=body.hardware,
        credential=evaluations.credential_id(body.backend, body.credential),
        timeout_s=body.timeout_s,
        max_attempts=body.max_attempts,
    )
    plan = evaluations.save_plan(run, draft, actor=user)
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
