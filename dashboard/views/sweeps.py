"""Sweeps: the list, and ``/sweeps/<id>?metric=eval_loss``, which ranks the runs of one.

The part that changes is fetched again when the live stream reports a change of a run.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from dashboard.access import or_404
from dashboard.live.cursor import follows_stream
from dashboard.presentation.changes import value_text
from dashboard.presentation.scatter import scatter
from dashboard.views.access import reader, signed_in
from runs import permissions
from runs.actions import sweeps as actions
from runs.backends import health, storage_health
from runs.models import Sweep
from runs.queries import keyset
from runs.queries import sweeps as queries
from runs.queries.comparison import MEASURES, MOST

METRICS = {measure.name: measure for measure in MEASURES if measure.better}


@require_safe
@never_cache
def sweeps(request: HttpRequest) -> HttpResponse:
    before = request.GET.get("before", "")[:100]
    found = queries.sweeps_for(reader(request))
    page, after = keyset.page(found, "created_at", before=before, limit=queries.PAGE)
    context = {
        "rows": [queries.sweep_row(sweep) for sweep in page],
        "after": after,
        "first_page": not before,
        "can_submit": permissions.can_submit(request.user),
    }
    return render(request, "sweeps/sweeps.html", context)


@require_safe
@never_cache
@follows_stream
def sweep(request: HttpRequest, sweep_id: UUID) -> HttpResponse:
    """The page; with ``?part=1`` only the fragment that changes."""
    found = _sweep(request, sweep_id)
    ranked = queries.ranked(found, request.user, request.GET.get("metric", ""))
    fields = ranked["sweep"]["parameters"]
    runs = ranked["runs"]
    plots = (scatter(each["label"], each["field"], runs) for each in fields)
    context: dict[str, Any] = {
        "sweep": ranked["sweep"],
        "created_at": found.created_at,
        "metric": METRICS[ranked["metric"]],
        "metrics": METRICS.values(),
        "fields": fields,
        "rows": [
            row
            | {
                "cells": [
                    (each["label"], value_text(row["values"].get(each["field"]))) for each in fields
                ]
            }
            for row in runs
        ],
        "best": runs[0] if runs and runs[0]["rank"] else None,
        "plots": [plot for plot in plots if plot],
        "compared": ",".join(row["run"]["id"] for row in runs[:MOST]),
        "can_stop": permissions.can_operate(request.user, found),
        "open_runs": ranked["sweep"]["runs"] - ranked["sweep"]["ended"],
        "storage": storage_health.storage_problem(),
        "silent_since": health.silent_since(),
    }
    part = "sweeps/_sweep.html" if request.GET.get("part") else "sweeps/sweep.html"
    return render(request, part, context)


@require_POST
def stop(request: HttpRequest, sweep_id: UUID) -> HttpResponse:
    found = _sweep(request, sweep_id)
    if not permissions.can_operate(request.user, found):
        raise PermissionDenied("Operators can stop only their own sweeps.")
    stopped = actions.stop(found, actor=signed_in(request))
    ending = "" if stopped == 1 else "s"
    messages.success(request, f"{found.name}: stopping {stopped} run{ending}.")
    return redirect("sweep", sweep_id=found.pk)


def _sweep(request: HttpRequest, sweep_id: UUID) -> Sweep:
    return or_404(queries.find(reader(request), sweep_id))
