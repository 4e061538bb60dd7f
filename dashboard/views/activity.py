"""Parts of the run page that are rendered by the server and refreshed by the page: the Activity
tab, and the findings in the left rail."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.dateparse import parse_datetime
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.parameters import text_of
from dashboard.views.access import run_to_see
from runs import permissions
from runs.models import Run
from runs.queries import activity, findings

PAGE = 100


@require_safe
@never_cache
def activity_list(request: HttpRequest, run_id: Any) -> HttpResponse:
    """``?source=alert&level=error&replica=3&text=words&before=<time>``."""
    run = run_to_see(request, run_id)
    return render(request, "runs/_activity.html", activity_context(request, run))


def activity_context(request: HttpRequest, run: Run) -> dict[str, Any]:
    """Context of ``runs/_activity.html``. Filters that cannot be parsed are ignored."""
    filters = _filters(request)
    rows = activity.activity(run, filters, limit=PAGE + 1)
    older = rows[PAGE - 1]["at"] if len(rows) > PAGE else None
    return {
        "run": run,
        "rows": rows[:PAGE],
        "older": older,
        "filters": filters,
        "can_operate": permissions.can_operate(request.user, run),
    }


def _filters(request: HttpRequest) -> activity.Filters:
    source, level = request.GET.get("source", ""), request.GET.get("level", "")
    number = request.GET.get("replica", "")
    fits = number.isascii() and number.isdecimal() and len(number) < 8
    return activity.Filters(
        source=source if source in activity.SOURCES else "",
        level=level if level in activity.LEVELS else "",
        replica=int(number) if fits else None,
        text=text_of(request.GET, "text")[: activity.SEARCH_CHARS],
        before=_time(request.GET.get("before", "")),
    )


def _time(text: str) -> datetime | None:
    try:
        return activity.aware(parse_datetime(text[:40]))
    except ValueError:
        return None


@require_safe
@never_cache
def findings_list(request: HttpRequest, run_id: Any) -> HttpResponse:
    run = run_to_see(request, run_id)
    return render(request, "runs/_findings.html", {"findings": findings.of_run(run), "run": run})
