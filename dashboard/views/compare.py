"""Runs beside each other: ``/compare?ids=<id>,<id>&base=<id>``.

Everything chosen is in the address. The page shows the tables, ``compare.json`` brings the curves
and ``compare.csv`` the tables for elsewhere.
"""

from __future__ import annotations

import csv
import uuid
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from runs import permissions
from runs.json_values import finite, iso
from runs.models import Run
from runs.queries import comparison, selectors
from runs.queries.comparison import MEASURES, MOST, Curve
from runs.queries.export_formats import csv_text
from runs.states import RUN_ENDED


@dataclass(frozen=True, kw_only=True)
class Asked:
    """``runs`` in the order asked for, the baseline first; ``unknown`` are ids of none that
    somebody may see, ``left_out`` those beyond :data:`MOST`."""

    runs: list[Run]
    unknown: list[str]
    left_out: int

    @property
    def ids(self) -> str:
        return ",".join(str(run.pk) for run in self.runs)


@require_safe
@never_cache
def compare(request: HttpRequest) -> HttpResponse:
    asked = _asked(request)
    runs = asked.runs
    table = comparison.table(comparison.measured(runs))
    context = {
        "asked": asked,
        "most": MOST,
        "rows": [
            {"run": run, "number": number, "cells": list(zip(MEASURES, cells, strict=True)),
             "without": ",".join(str(r.pk) for r in runs if r is not run)}
            for number, (run, cells) in enumerate(zip(runs, table, strict=True))
        ],
        "measures": MEASURES,
        "differences": comparison.differences(runs),
        "active": any(run.state not in RUN_ENDED for run in runs),
        "now": timezone.now(),
    }  # fmt: skip
    return render(request, "compare/compare.html", context, status=_status(asked))


@require_safe
@never_cache
def compare_json(request: HttpRequest) -> JsonResponse:
    asked = _asked(request)
    body = {
        "runs": [{"id": str(run.pk), "name": run.name} for run in asked.runs],
        "curves": [_columns(curve) for curve in comparison.curves(asked.runs)],
    }
    return JsonResponse(body, status=_status(asked))


@require_safe
@never_cache
def compare_csv(request: HttpRequest) -> HttpResponse:
    """A line for each run: measures, their differences to the baseline, settings that differ.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    asked = _asked(request)
    runs = asked.runs
    different = comparison.differences(runs)
    response = HttpResponse(content_type="text/csv; charset=utf-8", status=_status(asked))
    response["Content-Disposition"] = 'attachment; filename="comparison.csv"'
    writer = csv.writer(response)
    measures = [m.name for m in MEASURES]
    writer.writerow(
        ["id", "name", "state", "owner", "created_at", "rounds", *measures]
        + [f"{name}_change" for name in measures]
        + [_text(d.name) for d in different]
    )
    table = comparison.table(comparison.measured(runs))
    for place, (run, cells) in enumerate(zip(runs, table, strict=True)):
        writer.writerow(
            [run.pk, _text(run.name), run.state, _text(run.owner.get_username())]
            + [iso(run.created_at), run.committed_rounds]
            + [_number(cell.value) for cell in cells]
            + [_number(cell.change) for cell in cells]
            + [_text(d.values[place]) for d in different]
        )
    return response


def _asked(request: HttpRequest) -> Asked:
    if not permissions.may_look(request.user):
        raise PermissionDenied("An administrator can give you a role.")
    words = dict.fromkeys(w.strip() for w in request.GET.get("ids", "").split(",") if w.strip())
    base = request.GET.get("base", "")
    if base in words:  # pinned: first, and never among those left out
        words = {base: None} | words
    wanted, unknown = {}, []
    for word in list(words)[:MOST]:
        try:
            wanted[uuid.UUID(word)] = word
        except ValueError:
            unknown.append(word[:64])
    found = selectors.runs_for(request.user).filter(pk__in=wanted).prefetch_related("pools")
    by_id = {run.pk: run for run in found} if wanted else {}
    return Asked(
        runs=[by_id[pk] for pk in wanted if pk in by_id],
        unknown=unknown + [word for pk, word in wanted.items() if pk not in by_id],
        left_out=max(0, len(words) - MOST),
    )


def _status(asked: Asked) -> int:
    if asked.left_out:
        return 422
    return 404 if asked.unknown and not asked.runs else 200


def _columns(curve: Curve) -> dict[str, Any]:
    return {
        "run": curve.run,
        "series": curve.series,
        "tokens": curve.tokens.tolist(),
        "wall": [round(s, 2) for s in curve.wall_s.tolist()],
        "money": None if curve.usd is None else [round(usd, 6) for usd in curve.usd.tolist()],
        "value": [finite(v) for v in curve.value.tolist()],
        "total": curve.total,
    }


def _number(value: float | None) -> float | str:
    return "" if value is None else value


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if isinstance(value, int | float) else csv_text(text)
