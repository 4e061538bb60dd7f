"""The admin's list of orphaned jobs: running, billed, and part of no active run.

The reaper ends them automatically (:mod:`runs.reconcile.orphan_reaper`), or only reports them under
the policy ``report``. Here an administrator sees them at once and can end them. Jobs are listed
again before they are ended, so a job that got an attempt in the meantime is kept.
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
from runs.admin.base import Confirmation, back, confirmed, plural
from runs.queries.replica_history import console_url
from runs.reconcile import orphan_reaper
from runs.reconcile.orphan_reaper import AccountJob


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def orphans(request: HttpRequest) -> HttpResponse:
    """List unwanted jobs of all accounts; accounts that do not answer are listed with the error."""
    if not permissions.has_role(request.user, "admin"):
        raise PermissionDenied
    jobs, unreachable = orphan_reaper.find_orphans(timezone.now())
    if request.method == "POST":
        selected_keys = set(request.POST.getlist(ACTION_CHECKBOX_NAME))
        chosen = [account_job for account_job in jobs if _key(account_job) in selected_keys]
        if not confirmed(request):
            return _ask(request, chosen)
        _end(request, chosen)
        return back(request)
    context = {
        **admin.site.each_context(request),
        "title": "Orphans",
        "rows": [_row(account_job) for account_job in jobs],
        "silent": unreachable,
        "field": ACTION_CHECKBOX_NAME,
        "cancels": settings.REAPER_POLICY == "cancel",
    }
    return TemplateResponse(request, "admin/runs/orphans.html", context)


def _key(account_job: AccountJob) -> str:
    text = f"{account_job.backend}:{account_job.job.handle.to_json()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _row(account_job: AccountJob) -> dict[str, Any]:
    handle, attempt = account_job.job.handle, account_job.job.attempt
    return {
        "key": _key(account_job),
        "launch_key": handle.launch_key,
        "backend": BACKENDS.get(account_job.backend, account_job.backend),
        "credential": account_job.credential,
        "why": account_job.job.why,
        "run": attempt.replica.run if attempt else None,
        "replica": attempt.replica if attempt else None,
        "url": console_url({"backend": handle.backend, "data": dict(handle.data)}),
        "job": ", ".join(f"{name} {value}" for name, value in handle.data.items()),
    }


def _ask(request: HttpRequest, chosen: list[AccountJob]) -> HttpResponse:
    if not chosen:
        messages.warning(request, "No job was selected, or the selected jobs no longer exist.")
        return back(request)
    return Confirmation(
        words="Their backends are asked to end them now. They are lost; no run depends on them.",
        button=f"End {plural(len(chosen), 'job')}",
        action="end",
        origin="Orphans",
        head=("Launch key", "Backend", "Why", "Job"),
        rows=[(r["launch_key"], r["backend"], r["why"], r["job"]) for r in map(_row, chosen)],
        keys=[_key(account_job) for account_job in chosen],
    ).page(request)


def _end(request: HttpRequest, chosen: list[AccountJob]) -> None:
    for account_job in chosen:
        name = account_job.job.handle.launch_key
        problem = orphan_reaper.end(account_job)
        if problem:
            messages.error(request, f"{name} could not be ended: {problem}")
        else:
            messages.success(request, f"{name}: end requested from its backend")
    if not chosen:
        messages.warning(request, "The selected jobs no longer exist.")
