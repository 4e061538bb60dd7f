"""Every row of a run as a file that is written while it is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils.text import slugify
from ninja import Router

from dashboard.api.auth import run_to_see
from dashboard.api.problems import Problem, answer
from dashboard.api.types import RunId
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
    # Under ASGI Django would read a synchronous iterator to its end before it sends any of it.
    content = _asynchronous(body) if isinstance(request, ASGIRequest) else body
    response: HttpResponse | StreamingHttpResponse = StreamingHttpResponse(
        content, content_type=CONTENT_TYPES[format]
    )
    name = f"{slugify(run.name) or 'run'}-{str(run.pk)[:8]}-{table}.{format}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    response["Cache-Control"] = "no-store"
    response["X-Accel-Buffering"] = "no"
    return response


async def _asynchronous(body: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Each chunk is read in the request's own thread, whose database connection it shares."""

    def take() -> bytes | None:
        return next(body, None)

    while (part := await sync_to_async(take)()) is not None:
        yield part
