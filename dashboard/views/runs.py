"""The runs list: newest first, keyset pages, kept live by one stream."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.dateparse import parse_datetime
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from runs import live, selectors
from runs.models import Run

PAGE_SIZE = 50


@require_safe
@never_cache
def runs(request: HttpRequest) -> HttpResponse:
    cursor = live.latest_id()  # before the rows are read, so that no delta falls between
    archived = bool(request.GET.get("archived"))
    visible = selectors.runs_for(request.user).filter(archived_at__isnull=not archived)
    before = parse_before(request.GET.get("before", ""))
    rows, older = page(visible, before)
    context = {
        "rows": rows,
        "older": older,
        "first_page": before is None,
        "cursor": cursor,
        "may_submit": selectors.may_submit(request.user),
        "archived": archived,
    }
    return render(request, "runs/list.html", context)


@require_safe
@never_cache
def runs_json(request: HttpRequest) -> JsonResponse:
    """Headers of the page that is shown: what the list polls when there is no stream."""
    archived = bool(request.GET.get("archived"))
    visible = selectors.runs_for(request.user).filter(archived_at__isnull=not archived)
    rows, _ = page(visible, parse_before(request.GET.get("before", "")))
    return JsonResponse({"runs": [row["header"] for row in rows]})


def page(
    visible: QuerySet[Run], before: tuple[datetime.datetime, uuid.UUID] | None
) -> tuple[list[dict[str, Any]], str]:
    """One page of rows, and the cursor of the next ('' on the last page)."""
    if before is not None:
        at, pk = before
        visible = visible.filter(Q(created_at__lt=at) | Q(created_at=at, pk__lt=pk))
    found = list(visible.prefetch_related("pools").order_by("-created_at", "-id")[: PAGE_SIZE + 1])
    shown = found[:PAGE_SIZE]
    older = ""
    if len(found) > PAGE_SIZE:
        older = f"{shown[-1].created_at.isoformat()}_{shown[-1].pk}"
    return [row(run) for run in shown], older


def row(run: Run) -> dict[str, Any]:
    header = selectors.run_header(run)
    total = header["total_rounds"]
    header["fraction"] = f"{header['committed_rounds'] / total:.4f}" if total else "0"
    backends = ", ".join(dict.fromkeys(pool.backend for pool in run.pools.all()))
    return {"header": header, "backends": backends}


def parse_before(text: str) -> tuple[datetime.datetime, uuid.UUID] | None:
    """The keyset cursor; None for anything that is not one, which shows the first page."""
    at, _, pk = text.partition("_")
    try:
        moment = parse_datetime(at)
        return (moment, uuid.UUID(pk)) if moment and moment.tzinfo else None
    except ValueError:
        return None
