"""The banners that only the server can know about: storage, and the bucket of a run. Open pages
fetch them again when alerts change, and now and then."""

from __future__ import annotations

import uuid
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.views import run as run_pages
from dashboard.views.access import bare_run, reader
from runs.backends import storage_health


@require_safe
@never_cache
def banners(request: HttpRequest) -> HttpResponse:
    """The banners of a page; ``?run=`` is the run that it shows."""
    reader(request)
    context: dict[str, Any] = {"storage": storage_health.storage_problem()}
    if text := request.GET.get("run", ""):
        try:
            run_id = uuid.UUID(text)
        except ValueError:
            raise Http404 from None
        run = bare_run(request, run_id)
        context = {**run_pages.banners(run), "run": run}
    return render(request, "partials/troubles.html", context)
