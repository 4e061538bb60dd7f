"""Saved views of the runs list: the caller's own, and those that other users share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Path, Router, Status
from ninja.errors import AuthorizationError
from pydantic import Field

from archipelago import rows as shared
from dashboard.access import or_404
from dashboard.api import rows
from dashboard.api.auth import keeper, reader
from dashboard.api.types import NO_NUL, SMALL, Body, responses
from runs.actions import saved_views as service
from runs.queries import groups, search, table
from runs.queries.listing import NEWEST, SORTS

router = Router(tags=["views"])

ViewId = Annotated[int, Path(ge=0, le=SMALL)]


class View(Body):
    """``columns`` are column names; empty for the default columns. ``differing`` adds the settings
    in which the listed runs differ; ``group`` shows groups with totals instead of runs. Only
    operators and administrators can set ``shared``."""

    name: Annotated[str, Field(min_length=1, max_length=service.NAME_LENGTH, pattern=NO_NUL)]
    query: Annotated[str, Field(max_length=search.LONGEST, pattern=NO_NUL)] = ""
    sort: Annotated[str, Field(pattern=f"^-?({'|'.join(SORTS)})$")] = NEWEST
    columns: Annotated[
        list[Literal[tuple(column.name for column in table.COLUMNS)]],  # type: ignore[valid-type]
        Field(max_length=len(table.COLUMNS)),
    ] = Field(default_factory=list)
    differing: bool = False
    group: Literal["", *groups.BY] = ""  # type: ignore[valid-type]
    shared: bool = False


@router.get("/views", response=responses(rows.Views, but=(404, 409, 413)))
def list_views(request: HttpRequest) -> Any:
    """The caller's own views and shared ones, by name."""
    user = reader(request)
    return {"views": [service.row(view, user=user) for view in service.views_for(user)]}


@router.post("/views", response=responses(shared.View, status=201, but=(404,)))
def save_view(request: HttpRequest, body: View) -> Any:
    """Save a query, an order and columns under a name that is unique among the caller's views."""
    user = keeper(request)
    search.parse(body.query)
    if body.shared and not service.can_share(user):
        raise AuthorizationError(message=f"expected an operator, found {user}, a viewer")
    return Status(201, service.row(service.save(user, **body.model_dump()), user=user))


@router.delete("/views/{int:view_id}", response=responses(rows.Views, but=(409, 413)))
def delete_view(request: HttpRequest, view_id: ViewId) -> Any:
    """Delete an own view, or as administrator any. Returns the remaining views."""
    user = keeper(request)
    view = or_404(service.view_to_delete(user, view_id))
    if not service.can_delete(user, view):
        raise AuthorizationError(
            message=f"expected its owner {view.owner}, or an administrator, found {user}"
        )
    service.delete(view)
    return list_views(request)
