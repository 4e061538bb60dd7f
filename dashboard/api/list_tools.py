"""Groups of the runs list, and completions of its query."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Query, Router

from archipelago import list_rows as shared
from dashboard.api.auth import reader
from dashboard.api.types import SearchQuery, responses
from runs.queries import completion, groups, search

router = Router(tags=["runs"])


@router.get("/runs/groups", response=responses(shared.RunGroups, but=(404, 409, 413)))
def group_runs(
    request: HttpRequest,
    by: Annotated[Literal[tuple(groups.BY)], Query()],  # type: ignore[valid-type]
    q: SearchQuery = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = groups.GROUPS,
) -> Any:
    """The runs that match a query as groups with totals, the most expensive first."""
    user = reader(request)
    return groups.groups(user, search.parse(q), by, limit=limit)


@router.get("/runs/complete", response=responses(shared.Completions, but=(404, 409, 413)))
def complete_query(
    request: HttpRequest,
    q: SearchQuery = "",
    limit: Annotated[int, Query(ge=1, le=50)] = completion.LIMIT,
) -> Any:
    """Completions of the last term of a query: fields, then their values."""
    found = completion.completions(reader(request), q, limit=limit)
    return {"completions": [dataclasses.asdict(each) for each in found]}
