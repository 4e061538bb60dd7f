"""Export tables of a run as files. The response is streamed while rows are read."""

from __future__ import annotations

from typing import Any, Literal

from django.http import HttpRequest
from django.utils.text import slugify
from ninja import Router

from dashboard.api.auth import run_to_see
from dashboard.api.problems import Problem, answer
from dashboard.api.types import RunId
from dashboard.downloads import attachment
from runs.queries.export_formats import CONTENT_TYPES, NoParquet, writer_of
from runs.queries.exports import TABLES

router = Router(tags=["export"])

_FILES: dict[str, Any] = {
    "responses": {
        200: {
            "description": "The file",
            "content": {kind.partition(";")[0]: {} for kind in CONTENT_TYPES.values()},
        }
    }
}


@router.get(
    "/runs/{uuid:run_id}/export/{table}.{format}",
    response={401: Problem, 403: Problem, 404: Problem, 422: Problem, 501: Problem},
    openapi_extra=_FILES,
)
def export(
    request: HttpRequest,
    run_id: RunId,
    table: Literal[tuple(TABLES)],  # type: ignore[valid-type]
    format: Literal[tuple(CONTENT_TYPES)],  # type: ignore[valid-type]
) -> Any:
    """All rows, never sampled. Parquet needs pyarrow on the server: 501 without it."""
    run = run_to_see(request, run_id)
    try:
        write = writer_of(format)
    except NoParquet as error:
        return answer(request, 501, str(error))
    wanted = TABLES[table]
    body = write(wanted.columns, wanted.chunks(run))
    name = f"{slugify(run.name) or 'run'}-{str(run.pk)[:8]}-{table}.{format}"
    response = attachment(
        request, body, name=name, content_type=CONTENT_TYPES[format], database=True
    )
    response["Cache-Control"] = "no-store"
    return response
