"""Compare runs: ``/compare?ids=<id>,<id>&base=<id>``.

The URL holds the whole selection, and the metric, axis, smoothing and scale of the chart. The page
shows the tables, ``compare.json`` provides the curves and ``compare.csv`` the tables as a file.
"""

from __future__ import annotations

import csv
import uuid
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.live.cursor import follows_stream
from dashboard.presentation.curves import curves_body
from dashboard.views.access import reader
from runs.json_values import iso
from runs.models import Run
from runs.queries import boards, comparison, selectors
from runs.queries.boards import Panel
from runs.queries.comparison import MEASURES, MOST
from runs.queries.export_formats import csv_text
from runs.states import RUN_ENDED


@dataclass(frozen=True, kw_only=True)
class Selection:
    """``runs`` in the requested order, the baseline first; ``unknown``: ids without a run that the
    user can see; ``left_out``: number of ids beyond :data:`MOST`."""

    runs: list[Run]
    unknown: list[str]
    left_out: int

    @property
    def ids(self) -> str:
        return ",".join(str(run.pk) for run in self.runs)


@require_safe
@never_cache
@follows_stream
def compare(request: HttpRequest) -> HttpResponse:
    """The page; with ``?part=1`` only the tables, which change while a run works."""
    selection = _selection(request)
    runs = selection.runs
    context = tables(runs) | {"asked": selection, "most": MOST, "now": timezone.now()}
    if not request.GET.get("part"):
        context |= {"metrics": boards.metrics_offered(runs), "axes": boards.AXES}
        context |= {"most_smooth": boards.MOST_SMOOTH}
    template = "compare/_tables.html" if request.GET.get("part") else "compare/compare.html"
    return render(request, template, context, status=_status(selection))


def tables(runs: list[Run]) -> dict[str, Any]:
    """The context of the tables of a comparison."""
    table = comparison.table(comparison.measured(runs))
    return {
        "rows": [
            {
                "run": run,
                "cells": list(zip(MEASURES, cells, strict=True)),
                "without": ",".join(str(r.pk) for r in runs if r is not run),
            }
            for run, cells in zip(runs, table, strict=True)
        ],
        "measures": MEASURES,
        "differences": comparison.differences(runs),
        "active": any(run.state not in RUN_ENDED for run in runs),
    }


@require_safe
@never_cache
def compare_json(request: HttpRequest) -> JsonResponse:
    """The curves of the metric ``series``."""
    selection, metric = _selection(request), request.GET.get("series", "eval_loss")
    if problem := Panel(metric=metric).problem():
        return JsonResponse({"error": f"{problem.field}: {problem.message}"}, status=422)
    return JsonResponse(curves_body(selection.runs, [metric]), status=_status(selection))


@require_safe
@never_cache
def compare_csv(request: HttpRequest) -> HttpResponse:
    """One line per run: measures, their differences to the baseline, and differing settings.

    A text that a spreadsheet would evaluate as a formula is prefixed with an apostrophe.
    """
    selection = _selection(request)
    runs = selection.runs
    different = comparison.differences(runs)
    response = HttpResponse(content_type="text/csv; charset=utf-8", status=_status(selection))
    response["Content-Disposition"] = 'attachment; filename="comparison.csv"'
    writer = csv.writer(response)
    measures = [m.name for m in MEASURES]
    writer.writerow(
        ["id", "name", "state", "owner", "created_at", "rounds", *measures]
        + [f"{name}_change" for name in measures]
        + [_text(d.name) for d in different]
    )
    table = comparison.table(comparison.measured(runs))
    for index, (run, cells) in enumerate(zip(runs, table, strict=True)):
        writer.writerow(
            [run.pk, _text(run.name), run.state, _text(run.owner.get_username())]
            + [iso(run.created_at), run.committed_rounds]
            + [_number(cell.value) for cell in cells]
            + [_number(cell.change) for cell in cells]
            + [_text(d.values[index]) for d in different]
        )
    return response


def _selection(request: HttpRequest) -> Selection:
    user = reader(request)
    texts = dict.fromkeys(w.strip() for w in request.GET.get("ids", "").split(",") if w.strip())
    base = request.GET.get("base", "")
    if base in texts:  # the baseline comes first and is never left out
        texts = {base: None} | texts
    wanted, unknown = {}, []
    for text in list(texts)[:MOST]:
        try:
            wanted[uuid.UUID(text)] = text
        except ValueError:
            unknown.append(text[:64])
    rows = selectors.runs_for(user).filter(pk__in=wanted).prefetch_related("pools")
    by_id = {run.pk: run for run in rows} if wanted else {}
    return Selection(
        runs=[by_id[pk] for pk in wanted if pk in by_id],
        unknown=unknown + [text for pk, text in wanted.items() if pk not in by_id],
        left_out=max(0, len(texts) - MOST),
    )


def _status(selection: Selection) -> int:
    if selection.left_out:
        return 422
    return 404 if selection.unknown and not selection.runs else 200


def _number(value: float | None) -> float | str:
    return "" if value is None else value


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if isinstance(value, int | float) else csv_text(text)
