"""The search of every page: runs, replicas, pages and actions."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Query, Router

from archipelago import frame_rows as shared
from dashboard.api.auth import reader
from dashboard.api.types import NO_NUL, responses
from dashboard.presentation import palette
from runs.queries import finder

router = Router(tags=["search"])


@router.get("/search", response=responses(shared.FoundPage, but=(404, 409, 413)))
def search_everything(
    request: HttpRequest,
    q: Annotated[
        str, Query(max_length=finder.LONGEST, pattern=NO_NUL, description="e.g. `five 3`")
    ] = "",
    run: Annotated[UUID | None, Query(description="Offer the actions on this run first")] = None,
    limit: Annotated[int, Query(ge=1, le=50)] = palette.LIMIT,
) -> Any:
    """Find runs, replicas, pages and actions by some typed characters, the best first."""
    user = reader(request)
    return {"found": palette.entries(user, q, run_id=str(run or ""), limit=limit)}
