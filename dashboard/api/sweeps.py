"""Sweeps: create, plan, rank, stop."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Annotated, Any, Literal
from uuid import UUID

from django.http import HttpRequest
from ninja import Path, Query, Router, Status
from ninja.errors import AuthorizationError
from pydantic import BaseModel, ConfigDict, Field

from archipelago import sweep_rows as shared
from dashboard.access import or_404
from dashboard.api.auth import OPERATORS, reader, submitter
from dashboard.api.document import RunDocument, Text, Usd, draft_of
from dashboard.api.problems import FieldProblem, Invalid, at
from dashboard.api.runs import IdempotencyKey, other_document
from dashboard.api.types import NO_NUL, Body, responses
from runs import permissions
from runs.actions import sweeps as actions
from runs.exceptions import InvalidRun
from runs.models import Sweep
from runs.queries import keyset
from runs.queries import sweeps as queries
from runs.submit import create, preflight, sweeps
from runs.submit.sweep_space import MOST_FIELDS, MOST_RUNS, TEXT_LENGTH, parameters_of
from runs.submit.sweeps import DEFAULT_METRIC, METRICS, SweepDraft

router = Router(tags=["sweeps"])

SweepId = Annotated[UUID, Path(description="The sweep's id")]
Metric = Literal[METRICS]  # type: ignore[valid-type]
Value = float | Annotated[Text, Field(max_length=200)]


class Parameter(Body):
    """A field of the document and its values: a list, or text such as ``1e-4, 3e-4`` or
    ``1e-4..1e-2 x5 log``."""

    model_config = ConfigDict(title="Sweep parameter")

    field: Annotated[Text, Field(min_length=1, max_length=80)]
    values: (
        Annotated[list[int | Value], Field(min_length=1, max_length=MOST_RUNS)]
        | Annotated[Text, Field(max_length=TEXT_LENGTH)]
    )


class SweepDocument(Body):
    """``run`` is the document of each run; its name is that of the sweep. Every combination of the
    values is a run. ``parallel`` limits the runs that work at a time, ``budget_usd`` what all runs
    spend together; 0 means no limit. ``over_budget``: launch although the estimate is higher."""

    model_config = ConfigDict(title="Sweep document")

    run: RunDocument
    parameters: Annotated[list[Parameter], Field(min_length=1, max_length=MOST_FIELDS)]
    metric: Metric = DEFAULT_METRIC
    parallel: Annotated[int, Field(ge=0, le=MOST_RUNS)] = 0
    budget_usd: Usd = 0.0
    over_budget: bool = False


class SweepPlan(BaseModel):
    """Estimates of all runs together, and the reasons for which the sweep would be rejected."""

    runs: int | None
    tokens: int | None
    usd: float | None
    hours: float | None
    problems: list[FieldProblem] = Field(default_factory=list)


class Stopped(BaseModel):
    """``stopped`` is the number of runs that were stopped now."""

    stopped: int


@router.post(
    "/sweeps",
    auth=OPERATORS,
    response=responses(shared.RankedSweep, status=201, but=(404,)) | {200: shared.RankedSweep},
)
def create_sweep(
    request: HttpRequest, document: SweepDocument, idempotency_key: IdempotencyKey = None
) -> Any:
    """Create a run for each combination of the values: all of them, or none.

    The same document with the same ``Idempotency-Key`` returns the first sweep with status 200;
    another document with that key is rejected.
    """
    user = submitter(request)
    key = idempotency_key or secrets.token_urlsafe(24)
    again, draft = create.is_submitted(Sweep, key), _draft(document)
    sweep = sweeps.create_sweep(
        draft,
        owner=user,
        submit_key=key,
        over_budget=document.over_budget,
        preflight=preflight.check_runs,
    )
    if field := sweeps.differing_field(sweep, draft):
        raise Invalid([at("submit_key", other_document(f"sweep {sweep.pk}", field))])
    return Status(200 if again else 201, queries.ranked(_sweep(request, sweep.pk), user))


@router.post("/sweeps/plan", auth=OPERATORS, response=responses(SweepPlan, but=(404, 409)))
def plan_sweep(
    request: HttpRequest,
    document: SweepDocument,
    ask: Annotated[bool, Query(description="Also check backends, bucket and data")] = True,
) -> Any:
    """Estimate a sweep and check it. Nothing is stored or started."""
    user = submitter(request)
    checks = preflight.check_runs if ask else None
    draft = _draft(document)
    problems: list[FieldProblem] = []
    result: dict[str, Any] = dict.fromkeys(("runs", "tokens", "usd", "hours"))
    try:
        result = dataclasses.asdict(sweeps.estimate_sweep(draft, draft.drafts()))
        sweeps.check_sweep(draft, user, over_budget=document.over_budget, preflight=checks)
    except InvalidRun as error:
        problems = [at(each.field, each.message) for each in error.problems]
    return result | {"problems": problems}


@router.get("/sweeps", response=responses(shared.SweepPage, but=(404, 409, 413)))
def list_sweeps(
    request: HttpRequest,
    before: Annotated[
        str, Query(max_length=100, pattern=NO_NUL, description="`next` of the previous page")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=200)] = queries.PAGE,
) -> Any:
    """A page of sweeps, newest first."""
    found = queries.sweeps_for(reader(request))
    page, more = keyset.page(found, "created_at", before=before, limit=limit)
    return {"sweeps": [queries.sweep_row(sweep) for sweep in page], "next": more or None}


@router.get("/sweeps/{uuid:sweep_id}", response=responses(shared.RankedSweep, but=(409, 413)))
def get_sweep(
    request: HttpRequest,
    sweep_id: SweepId,
    metric: Annotated[Metric | None, Query(description="Rank by this metric")] = None,
) -> Any:
    """A sweep with its runs, the best first."""
    user = reader(request)
    return queries.ranked(_sweep(request, sweep_id), user, metric or "")


@router.post(
    "/sweeps/{uuid:sweep_id}/stop", auth=OPERATORS, response=responses(Stopped, but=(409,))
)
def stop_sweep(request: HttpRequest, sweep_id: SweepId) -> Any:
    """Stop all runs of a sweep; those that wait for their turn never start."""
    user = submitter(request)
    sweep = _sweep(request, sweep_id)
    if not permissions.can_operate(user, sweep):
        raise AuthorizationError(
            message=f"expected its owner {sweep.owner}, or an administrator, found {user}"
        )
    return {"stopped": actions.stop(sweep, actor=user)}


def _draft(document: SweepDocument) -> SweepDraft:
    draft = draft_of(document.run)
    pairs = [(each.field, each.values) for each in document.parameters]
    return SweepDraft(
        draft=draft,
        parameters=parameters_of(pairs, draft),
        metric=document.metric,
        parallel=document.parallel,
        budget_usd=document.budget_usd,
    )


def _sweep(request: HttpRequest, sweep_id: UUID) -> Sweep:
    return or_404(queries.find(reader(request), sweep_id))
