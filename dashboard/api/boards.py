"""Boards: saved comparisons, the caller's own and those that other users share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Router, Status
from pydantic import ConfigDict, Field

from archipelago import board_rows as shared
from dashboard.access import or_404
from dashboard.api import shared_rows
from dashboard.api.auth import keeper, reader
from dashboard.api.types import NO_NUL, Body, RowId, responses
from dashboard.presentation.curves import curves_body
from runs.actions import boards as actions
from runs.actions.shared_rows import NAME_LENGTH, visible
from runs.models import Board
from runs.queries import boards as queries
from runs.queries import search
from runs.queries.boards import AXES, METRIC_LENGTH, MOST_PANELS, MOST_SMOOTH
from runs.queries.comparison import MOST

router = Router(tags=["boards"])


class PanelBody(Body):
    """``metric`` is ``eval_loss``, ``loss``, ``contributors`` or a series of evaluation results
    (``eval-<plan>-<metric>``)."""

    model_config = ConfigDict(title="Panel of a board")

    metric: Annotated[str, Field(min_length=1, max_length=METRIC_LENGTH, pattern=NO_NUL)]
    x: Literal[tuple(AXES)] = "tokens"  # type: ignore[valid-type]
    smooth: Annotated[float, Field(ge=0, le=MOST_SMOOTH, allow_inf_nan=False)] = 0.0
    log: bool = False


class BoardBody(Body):
    """Either ``runs``, ids in display order, or ``query``, whose newest runs are shown. Without
    ``panels`` the losses are drawn. Only operators and administrators can set ``shared``."""

    model_config = ConfigDict(title="Board document")

    name: Annotated[str, Field(min_length=1, max_length=NAME_LENGTH, pattern=NO_NUL)]
    runs: Annotated[
        list[Annotated[str, Field(max_length=64, pattern=NO_NUL)]], Field(max_length=MOST)
    ] = Field(default_factory=list)
    query: Annotated[str, Field(max_length=search.LONGEST, pattern=NO_NUL)] = ""
    panels: Annotated[list[PanelBody], Field(max_length=MOST_PANELS)] = Field(default_factory=list)
    shared: bool = False


@router.get("/boards", response=responses(shared.Boards, but=(404, 409, 413)))
def list_boards(request: HttpRequest) -> Any:
    """The caller's own boards and shared ones, by name."""
    user = reader(request)
    return {"boards": [queries.board_row(board, user=user) for board in visible(Board, user)]}


@router.post("/boards", response=responses(shared.Board, status=201, but=(404,)))
def save_board(request: HttpRequest, body: BoardBody) -> Any:
    """Save a board under a name that is unique among the caller's boards."""
    return Status(201, _save(request, body, None))


@router.get("/boards/{int:board_id}", response=responses(shared.BoardResults, but=(409, 413)))
def get_board(request: HttpRequest, board_id: RowId) -> Any:
    """A board with the results of its runs."""
    return queries.results(_found(request, board_id), user=reader(request))


@router.get("/boards/{int:board_id}/curves", response=responses(dict[str, Any], but=(409, 413)))
def get_board_curves(request: HttpRequest, board_id: RowId) -> Any:
    """``runs`` (id, name) and ``curves``: for each run and metric ``value`` with the columns
    ``tokens``, ``wall`` (seconds) and ``money`` (null if a price is unknown)."""
    found = _found(request, board_id)
    metrics = queries.metrics_of(queries.panels_of(found))
    return curves_body(queries.runs_of(found, request.user), metrics)


@router.put("/boards/{int:board_id}", response=responses(shared.Board))
def change_board(request: HttpRequest, board_id: RowId, body: BoardBody) -> Any:
    """Replace the content of an own board."""
    return _save(request, body, shared_rows.own(Board, keeper(request), board_id))


@router.delete("/boards/{int:board_id}", response=responses(shared.Boards, but=(409, 413)))
def delete_board(request: HttpRequest, board_id: RowId) -> Any:
    """Delete an own board, or as administrator any. Returns the remaining boards."""
    shared_rows.delete(request, Board, board_id)
    return list_boards(request)


def _found(request: HttpRequest, board_id: int) -> Board:
    return or_404(visible(Board, reader(request)).filter(pk=board_id).first())


def _save(request: HttpRequest, body: BoardBody, board: Board | None) -> dict[str, Any]:
    user = keeper(request)
    shared_rows.check_shared(user, body.shared)
    values = body.model_dump(exclude={"panels"})
    panels = [queries.Panel(**panel.model_dump()) for panel in body.panels]
    saved = actions.save(user, panels=panels, board=board, **values)
    return queries.board_row(saved, user=user)
