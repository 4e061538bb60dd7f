"""Orphans in the admin: jobs that an account bills and that no live run has.

The reaper ends them by itself (:mod:`runs.reconcile.orphan_reaper`), or under its policy ``report``
only tells. Here an administrator sees them at once, and ends them: what is ended is looked for once
more first, so a job that belongs to an attempt by then is left alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from executors.registry import BACKENDS
from runs import permissions
from runs.admin.base import Question, back, confirmed
from runs.queries.replica_history import console_url
from runs.reconcile import orphan_reaper
from runs.reconcile.orphan_reaper import Sight


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def orphans(request: HttpRequest) -> HttpResponse:
    """Each account is asked when somebody looks; one that does not answer says so."""
    if not permissions.has_role(request.user, "admin"):
        raise PermissionDenied
    found, silent = orphan_reaper.look(timezone.now())
    if request.method == "POST":
        wanted = set(request.POST.getlist(ACTION_CHECKBOX_NAME))
        chosen = [sight for sight in found if _key(sight) in wanted]
        if not confirmed(request):
            return _ask(request, chosen)
        _end(request, chosen)
        return back(request)
    context = {
        **admin.site.each_context(request),
        "title": "Orphans",
        "rows": [_row(sight) for sight in found],
        "silent": silent,
        "field": ACTION_CHECKBOX_NAME,
        "cancels": settings.REAPER_POLICY == "cancel",
    }
    return TemplateResponse(request, "admin/runs/orphans.html", context)


def _key(sight: Sight) -> str:
    text = f"{sight.backend}:{sight.found.handle.to_json()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _row(sight: Sight) -> dict[str, Any]:
    handle, attempt = sight.found.handle, sight.found.attempt
    return {
        "key": _key(sight),
        "launch_key": handle.launch_key,
        "backend": BACKENDS.get(sight.backend, sight.backend),
        "credential": sight.credential,
        "why": sight.found.why,
        "run": attempt.replica.run if attempt else None,
        "replica": attempt.replica if attempt else None,
        "url": console_url({"backend": handle.backend, "data": dict(handle.data)}),
        "job": ", ".join(f"{name} {value}" for name, value in handle.data.items()),
    }


def _ask(request: HttpRequest, chosen: list[Sight]) -> HttpResponse:
    if not chosen:
        messages.warning(request, "Nothing was chosen, or it is gone by now.")
        return back(request)
    count = f"{len(chosen)} job{'s' if len(chosen) != 1 else ''}"
    return Question(
        title=f"End {count}?",
        words="Their backends are asked to end them now. Nothing of them is kept; no run counts "
        "on them.",
        button=f"End {count}",
        action="end",
        origin="Orphans",
        head=("Launch key", "Backend", "Why", "Job"),
        rows=[(r["launch_key"], r["backend"], r["why"], r["job"]) for r in map(_row, chosen)],
        keys=[_key(sight) for sight in chosen],
    ).page(request)


def _end(request: HttpRequest, chosen: list[Sight]) -> None:
    for sight in chosen:
        name = sight.found.handle.launch_key
        problem = orphan_reaper.end(sight)
        if problem:
            messages.error(request, f"{name} could not be ended: {problem}")
        else:
            messages.success(request, f"{name}: its backend was asked to end it")
    if not chosen:
        messages.warning(request, "Nothing is left of what was chosen.")
