"""What the run page shows beside its records: findings, activity, and log files."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Query, Router

from archipelago.run_page_rows import Activity, Finding
from dashboard.api.auth import run_to_see
from dashboard.api.exports import file_name, file_of, rows_file
from dashboard.api.problems import Problem
from dashboard.api.types import NO_NUL, IsoTime, OfReplica, RunId, responses
from runs.queries import activity, findings, log_files

router = Router(tags=["records"])

Text = Annotated[
    str, Query(max_length=activity.SEARCH_CHARS, pattern=NO_NUL, description="Substring")
]
Level = Annotated[
    Literal["", "warning", "error"], Query(description="Only rows of this level or worse")
]


@router.get("/runs/{uuid:run_id}/findings", response=responses(list[Finding], but=(409, 413)))
def list_findings(request: HttpRequest, run_id: RunId) -> Any:
    """Conditions of the run that need attention now, the worst first."""
    return findings.of_run(run_to_see(request, run_id))


@router.get("/runs/{uuid:run_id}/activity", response=responses(list[Activity], but=(409, 413)))
def list_activity(
    request: HttpRequest,
    run_id: RunId,
    source: Literal["", "event", "alert"] = "",
    level: Level = "",
    replica: OfReplica = None,
    text: Text = "",
    before: Annotated[
        datetime | None, Query(description="Only rows before this time"), IsoTime
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = activity.LIMIT,
) -> Any:
    """Events and alerts in one list, newest first."""
    run = run_to_see(request, run_id)
    filters = activity.Filters(
        source=source, level=level, replica=replica, text=text, before=activity.aware(before)
    )
    return activity.activity(run, filters, limit=limit)


@router.get(
    "/runs/{uuid:run_id}/logs.{format}",
    response={401: Problem, 403: Problem, 404: Problem, 422: Problem},
    openapi_extra=file_of(log_files.CONTENT_TYPES),
)
def get_log_file(
    request: HttpRequest,
    run_id: RunId,
    format: Literal["txt", "jsonl"],
    replica: OfReplica = None,
    level: Level = "",
    text: Text = "",
) -> Any:
    """All log lines that match the filters, oldest first, as text or JSON Lines."""
    run = run_to_see(request, run_id)
    body = log_files.log_file(run, format, replica=replica, level=level, text=text)
    name, kind = file_name(run, f"logs.{format}"), log_files.CONTENT_TYPES[format]
    return rows_file(request, body, name=name, content_type=kind)
