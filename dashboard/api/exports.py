"""Export the list of runs, or a table of a run, as a file that is streamed while rows are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from django.utils.text import slugify
from ninja import Query, Router

from dashboard.api.auth import reader, run_to_see
from dashboard.api.problems import Problem, answer
from dashboard.api.types import NO_NUL, RunId, SearchQuery
from dashboard.downloads import attachment
from runs.models import Run
from runs.queries import list_export, search, selectors
from runs.queries.export_formats import CONTENT_TYPES, Columns, NoParquet, writer_of
from runs.queries.exports import TABLES, Chunk
from runs.queries.listing import NEWEST, Order

router = Router(tags=["export"])


def file_of(content_types: Mapping[str, str]) -> dict[str, Any]:
    """The answer of an operation that returns a file, for the OpenAPI schema."""
    content: dict[str, Any] = {kind.partition(";")[0]: {} for kind in content_types.values()}
    return {"responses": {200: {"description": "The file", "content": content}}}


FILES = file_of(CONTENT_TYPES)
Format = Literal[tuple(CONTENT_TYPES)]  # type: ignore[valid-type]


@router.get(
    "/runs/export.{format}",
    response={401: Problem, 403: Problem, 422: Problem, 501: Problem},
    openapi_extra=FILES,
)
def export_runs(
    request: HttpRequest,
    format: Format,  # type: ignore[valid-type]
    q: SearchQuery = "",
    sort: Annotated[
        str, Query(max_length=40, pattern=NO_NUL, description="Column; - is descending")
    ] = NEWEST,
) -> Any:
    """All runs that match, one row each, with their group settings as JSON."""
    user = reader(request)
    runs = search.matching(selectors.runs_for(user), search.parse(q), user=user)
    rows = list_export.chunks(runs, Order.of(sort))
    return table_file(request, list_export.COLUMNS, rows, name=f"runs.{format}", format=format)


@router.get(
    "/runs/{uuid:run_id}/export/{table}.{format}",
    response={401: Problem, 403: Problem, 404: Problem, 422: Problem, 501: Problem},
    openapi_extra=FILES,
)
def export(
    request: HttpRequest,
    run_id: RunId,
    table: Literal[tuple(TABLES)],  # type: ignore[valid-type]
    format: Format,  # type: ignore[valid-type]
) -> Any:
    """All rows, never sampled. Parquet needs pyarrow on the server: 501 without it."""
    run = run_to_see(request, run_id)
    wanted, name = TABLES[table], file_name(run, f"{table}.{format}")
    return table_file(request, wanted.columns, wanted.chunks(run), name=name, format=format)


def file_name(run: Run, suffix: str) -> str:
    return f"{slugify(run.name) or 'run'}-{str(run.pk)[:8]}-{suffix}"


def table_file(
    request: HttpRequest, columns: Columns, rows: Iterator[Chunk], *, name: str, format: str
) -> Any:
    """The table as a download; 501 without pyarrow for Parquet."""
    try:
        write = writer_of(format)
    except NoParquet as error:
        return answer(request, 501, str(error))
    return rows_file(request, write(columns, rows), name=name, content_type=CONTENT_TYPES[format])


def rows_file(request: HttpRequest, body: Iterator[bytes], *, name: str, content_type: str) -> Any:
    """A download that is made of rows of the database."""
    response = attachment(request, body, name=name, content_type=content_type, database=True)
    response["Cache-Control"] = "no-store"
    return response
