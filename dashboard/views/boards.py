"""Boards: the list, ``/boards/<id>`` with live charts and results, and the form that changes one.

A board reuses the tables and charts of the comparison (:mod:`dashboard.views.compare`).
"""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from dashboard.access import or_404
from dashboard.forms.board import BoardForm, PanelRow, errors_of, panel_rows, panels_in
from dashboard.live.cursor import follows_stream
from dashboard.presentation.curves import curves_body
from dashboard.views.access import reader
from dashboard.views.compare import tables
from runs.actions import boards as actions
from runs.actions import shared_rows
from runs.exceptions import ActionRefused, InvalidRun
from runs.models import Board, Run
from runs.queries import boards as queries
from runs.queries import selectors
from runs.queries.boards import DEFAULT_PANELS
from runs.queries.comparison import MOST


@require_safe
@never_cache
def boards(request: HttpRequest) -> HttpResponse:
    user = reader(request)
    rows = [queries.board_row(board, user=user) for board in shared_rows.visible(Board, user)]
    return render(request, "boards/boards.html", {"boards": rows})


@require_safe
@never_cache
@follows_stream
def board(request: HttpRequest, board_id: int) -> HttpResponse:
    """The page; with ``?part=1`` only the tables, which change while a run works."""
    found = _found(request, board_id)
    user, runs = reader(request), queries.runs_of(found, request.user)
    panels = queries.panels_of(found)
    context = tables(runs) | {
        "board": queries.board_row(found, user=user),
        "fixed": True,
        "panels": [
            {
                "number": number,
                "panel": panel,
                "metric": queries.metric_label(panel.metric),
                "axis": queries.AXES[panel.x],
            }
            for number, panel in enumerate(panels, start=1)
        ],
        "can_delete": shared_rows.can_delete(user, found),
        "most": MOST,
        "now": timezone.now(),
    }
    part = "compare/_tables.html" if request.GET.get("part") else "boards/board.html"
    return render(request, part, context)


@require_safe
@never_cache
def board_json(request: HttpRequest, board_id: int) -> JsonResponse:
    """The curves of all panels."""
    found = _found(request, board_id)
    metrics = queries.metrics_of(queries.panels_of(found))
    return JsonResponse(curves_body(queries.runs_of(found, request.user), metrics))


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """Save a board. The address of the form can hold its values: ``?ids=…`` or ``?query=…``, and
    ``series``, ``x``, ``smooth`` and ``log`` of the first panel."""
    user = reader(request)
    if request.method == "POST":
        return _save(request, None)
    asked = request.GET
    ids = [text.strip() for text in asked.get("ids", "").split(",") if text.strip()]
    asked_panel = PanelRow.sent(
        asked.get("series", "eval_loss"),
        asked.get("x", "tokens"),
        asked.get("smooth", "0"),
        "log" if asked.get("log") == "y" else "linear",
    )
    panels = list(DEFAULT_PANELS) if asked_panel.problem else [asked_panel.panel]
    return _form(
        request,
        BoardForm(initial={"query": asked.get("query", "")}),
        runs=_runs(user, ids[:MOST]),
        rows=[PanelRow.of(panel) for panel in panels],
    )


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def edit(request: HttpRequest, board_id: int) -> HttpResponse:
    found = _found(request, board_id)
    if found.owner_id != reader(request).pk:
        raise PermissionDenied("Only its owner can change a board.")
    if request.method == "POST":
        return _save(request, found)
    initial = {"name": found.name, "query": found.query, "shared": found.shared}
    return _form(
        request,
        BoardForm(initial=initial),
        runs=queries.runs_of(found, request.user) if found.runs else [],
        rows=[PanelRow.of(panel) for panel in queries.panels_of(found)],
        board=found,
    )


@require_POST
def delete(request: HttpRequest, board_id: int) -> HttpResponse:
    user = reader(request)
    found = or_404(shared_rows.to_delete(Board, user, board_id))
    if not shared_rows.can_delete(user, found):
        raise PermissionDenied("Only its owner or an administrator can delete a board.")
    shared_rows.delete(found)
    messages.success(request, f"Board {found.name} deleted.")
    return redirect("boards")


def _found(request: HttpRequest, board_id: int) -> Board:
    return or_404(shared_rows.visible(Board, reader(request)).filter(pk=board_id).first())


def _runs(user: User, ids: list[str]) -> list[Run]:
    return queries.runs_of(Board(owner=user, runs=ids), user)


def _save(request: HttpRequest, board: Board | None) -> HttpResponse:
    user, form = reader(request), BoardForm(request.POST)
    ids = request.POST.getlist("runs")
    rows = panels_in(request.POST)
    refused: dict[str, str] = {}
    if form.is_valid() and not any(row.problem for row in rows):
        panels = [row.panel for row in rows]
        try:
            saved = actions.save(user, runs=ids, panels=panels, board=board, **form.cleaned_data)
        except InvalidRun as error:
            if error.field in ("runs", "panels"):
                refused[error.field] = error.message
            else:
                form.add_error(error.field if error.field in form.fields else None, error.message)
        except ActionRefused as error:
            form.add_error("name", str(error))
        else:
            messages.success(request, f"Board {saved.name} saved.")
            return redirect("board", board_id=saved.pk)
    runs = _runs(user, ids[:MOST])
    return _form(request, form, runs=runs, rows=rows, board=board, refused=refused)


def _form(
    request: HttpRequest,
    form: BoardForm,
    *,
    runs: list[Run],
    rows: list[PanelRow],
    board: Board | None = None,
    refused: dict[str, str] | None = None,
) -> HttpResponse:
    """The form; with ``refused``, messages by part of it, the answer to one that was not saved."""
    shown = runs or (queries.runs_of(board, request.user) if board else [])
    context = {
        "form": form,
        "runs": [selectors.run_header(run) for run in runs],
        "panels": panel_rows(rows, queries.metrics_offered(shown)),
        "at": {
            name: errors_of(name, *filter(None, [(refused or {}).get(name)]))
            for name in ("runs", "panels")
        },
        "board": board,
        "can_share": shared_rows.can_share(request.user),
        "most_smooth": queries.MOST_SMOOTH,
    }
    status = 200 if refused is None else 422
    return render(request, "boards/edit.html", context, status=status)
