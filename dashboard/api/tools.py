"""Tools: compare runs, estimate a group with the planner, upload the code of a workload."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal
from uuid import UUID

from django.http import HttpRequest
from ninja import Query, Router, Status
from ninja.errors import HttpError
from pydantic import ConfigDict, Field, create_model

from archipelago.board_rows import Comparison
from dashboard.api import rows
from dashboard.api.auth import OPERATORS, reader, submitter
from dashboard.api.types import NO_NUL, responses
from dashboard.forms.planner import bounds_of
from dashboard.presentation.curves import curves_body
from runs.exceptions import InvalidRun
from runs.models import Run
from runs.queries import boards, comparison, selectors
from runs.submit import planner
from runs.submit.uploads import ARCHIVE_BYTES, store_archive

router = Router(tags=["tools"])


def _question_fields() -> dict[str, Any]:
    """The planner's question, field by field, with the bounds its page has."""
    result: dict[str, Any] = {}
    for spec in dataclasses.fields(planner.PlannerInputs):
        bounds = bounds_of(spec.name)
        default = ... if spec.default is dataclasses.MISSING else spec.default
        if bounds.choices:
            kind: Any = Literal[bounds.choices]
        else:
            number: Any = int if bounds.whole else float
            kind = Annotated[number, Field(ge=number(bounds.least), le=number(bounds.most))]
        result[spec.name] = (kind | None if "None" in str(spec.type) else kind, default)
    return result


Question: Any = create_model(
    "Question",
    __config__=ConfigDict(extra="forbid", strict=True),
    __doc__="Input of the planner: see `/planner`. Unknown prices and failure rates are null.",
    **_question_fields(),
)


@router.get("/compare", response=responses(Comparison, but=(409, 413)))
def compare_runs(
    request: HttpRequest,
    id: Annotated[list[UUID], Query(min_length=1, max_length=comparison.MOST)],
) -> Any:
    """Compare up to twenty runs."""
    runs = _chosen(request, id)
    return {
        "runs": [selectors.run_header(run) for run in runs],
        "measures": comparison.measured(runs),
        "differences": [
            {"name": d.name, "label": d.label, "values": list(d.values)}
            for d in comparison.differences(runs)
        ],
    }


@router.get("/compare/curves", response=responses(dict[str, Any], but=(409, 413)))
def get_curves(
    request: HttpRequest,
    id: Annotated[list[UUID], Query(min_length=1, max_length=comparison.MOST)],
    metric: Annotated[str, Query(max_length=boards.METRIC_LENGTH, pattern=NO_NUL)] = "eval_loss",
) -> Any:
    """The curves of a metric of up to twenty runs, as ``/boards/{board_id}/curves``."""
    if problem := boards.Panel(metric=metric).problem():
        raise InvalidRun("metric", problem.message)
    return curves_body(_chosen(request, id), [metric])


def _chosen(request: HttpRequest, ids: list[UUID]) -> list[Run]:
    wanted = list(dict.fromkeys(ids))
    matching = selectors.runs_for(reader(request)).filter(pk__in=wanted).prefetch_related("pools")
    by_id = {run.pk: run for run in matching}
    for pk in wanted:
        if pk not in by_id:
            raise HttpError(404, f"expected ids of runs, found {pk}")
    return [by_id[pk] for pk in wanted]


@router.post("/planner", response=responses(dict[str, Any], but=(404, 409)))
def plan_group(request: HttpRequest, question: Question) -> Any:
    """Traffic, times, goodput and cost of a group, and the same for other values of H."""
    reader(request)
    asked = planner.PlannerInputs(**question.model_dump())
    return dataclasses.asdict(planner.plan(asked))


@router.post(
    "/archives",
    auth=OPERATORS,
    response=responses(rows.Archive, status=201, but=(400, 404, 409)),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
def upload_archive(request: HttpRequest) -> Any:
    """Upload a zip of Python files. Its sha256 is the ``archive`` of a workload that names a
    function in it."""
    submitter(request)
    data = request.read(ARCHIVE_BYTES + 1)
    archive = store_archive(data)
    if archive is None:
        raise InvalidRun("archive", "expected a zip of Python files, found an empty body")
    return Status(201, {"sha256": archive.sha256, "size_bytes": len(data)})
