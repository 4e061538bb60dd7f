"""Saved views of the runs list and of the run page: the caller's own, and those that other users
share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.contrib.auth.models import User
from django.http import HttpRequest
from ninja import Router, Status
from pydantic import ConfigDict, Field

from archipelago import rows as shared
from dashboard.api import rows, shared_rows
from dashboard.api.auth import keeper, reader
from dashboard.api.types import NO_NUL, Body, RowId, responses
from runs.actions import run_views
from runs.actions import saved_views as service
from runs.actions.shared_rows import NAME_LENGTH, visible
from runs.models import RunView, SavedView
from runs.queries import groups, panel_layout, search, table
from runs.queries.listing import NEWEST, SORTS
from runs.queries.panel_layout import PanelLayout

router = Router(tags=["views"])


class View(Body):
    """``columns`` are column names; empty for the default columns. ``differing`` adds the settings
    in which the listed runs differ; ``group`` shows groups with totals instead of runs. Only
    operators and administrators can set ``shared``."""

    name: Annotated[str, Field(min_length=1, max_length=NAME_LENGTH, pattern=NO_NUL)]
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
    return {"views": [service.row(view, user=user) for view in visible(SavedView, user)]}


@router.post("/views", response=responses(shared.View, status=201, but=(404,)))
def save_view(request: HttpRequest, body: View) -> Any:
    """Save a query, an order and columns under a name that is unique among the caller's views."""
    return Status(201, _save(keeper(request), body, None))


@router.put("/views/{int:view_id}", response=responses(shared.View))
def change_view(request: HttpRequest, view_id: RowId, body: View) -> Any:
    """Replace an own view."""
    user = keeper(request)
    return _save(user, body, shared_rows.own(SavedView, user, view_id))


def _save(user: User, body: View, view: SavedView | None) -> dict[str, Any]:
    search.parse(body.query)
    shared_rows.check_shared(user, body.shared)
    return service.row(service.save(user, view=view, **body.model_dump()), user=user)


@router.delete("/views/{int:view_id}", response=responses(rows.Views, but=(409, 413)))
def delete_view(request: HttpRequest, view_id: RowId) -> Any:
    """Delete an own view, or as administrator any. Returns the remaining views."""
    shared_rows.delete(request, SavedView, view_id)
    return list_views(request)


class RunViewBody(Body):
    """``panels``, ``x``, ``smooth``, ``log`` and ``clip`` are those of the address of a run's page.
    Only operators and administrators can set ``shared``."""

    model_config = ConfigDict(title="View of runs")

    name: Annotated[str, Field(min_length=1, max_length=NAME_LENGTH, pattern=NO_NUL)]
    panels: Annotated[str, Field(max_length=panel_layout.LONGEST, pattern=NO_NUL)] = ""
    x: Literal[panel_layout.AXES] = panel_layout.AXES[0]  # type: ignore[valid-type]
    smooth: Annotated[
        float | None, Field(ge=0, le=panel_layout.MOST_SMOOTH, allow_inf_nan=False)
    ] = None
    log: Literal[panel_layout.LOG_AXES] = ""  # type: ignore[valid-type]
    clip: bool | None = None
    shared: bool = False


@router.get("/run-views", response=responses(rows.RunViews, but=(404, 409, 413)))
def list_run_views(request: HttpRequest) -> Any:
    """Saved views of the run page, the caller's own and shared ones, by name."""
    user = reader(request)
    return {"views": [run_views.row(view, user=user) for view in visible(RunView, user)]}


@router.post("/run-views", response=responses(shared.RunView, status=201, but=(404,)))
def save_run_view(request: HttpRequest, body: RunViewBody) -> Any:
    """Save the layout of a run's panels under a name that is unique among the caller's views. It
    applies to every run."""
    return Status(201, _save_run_view(keeper(request), body, None))


@router.put("/run-views/{int:view_id}", response=responses(shared.RunView))
def change_run_view(request: HttpRequest, view_id: RowId, body: RunViewBody) -> Any:
    """Replace an own view of runs."""
    user = keeper(request)
    return _save_run_view(user, body, shared_rows.own(RunView, user, view_id))


def _save_run_view(user: User, body: RunViewBody, view: RunView | None) -> dict[str, Any]:
    layout = PanelLayout(**body.model_dump(exclude={"name", "shared"}))
    shared_rows.check_shared(user, body.shared)
    saved = run_views.save(user, layout, name=body.name, shared=body.shared, view=view)
    return run_views.row(saved, user=user)


@router.delete("/run-views/{int:view_id}", response=responses(rows.RunViews, but=(409, 413)))
def delete_run_view(request: HttpRequest, view_id: RowId) -> Any:
    """Delete an own view of runs, or as administrator any. Returns the remaining views."""
    shared_rows.delete(request, RunView, view_id)
    return list_run_views(request)
