"""The submit form: prefilled with the local demo, checked at the field, one run per form."""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.estimate import estimate as make_estimate
from dashboard.forms import RunForm, initial_from
from diloco.rendezvous.settings import SECTIONS, setting_fields
from diloco.rendezvous.workload import GPT_SIZES
from runs import create, preflight, presets, selectors, services
from runs.exceptions import InvalidRun
from runs.models import Run
from runs.presets import RunDraft

BASIC = frozenset(
    {"sync_every", "total_rounds", "codec", "outer_lr", "outer_momentum", "inner_lr",
     "batch_size", "warmup_steps", "min_quorum", "grace_s", "eval_every", "checkpoint_every"}
)  # fmt: skip
"""Settings shown at once; the others wait behind *More*."""


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    if not selectors.may_submit(request.user):
        raise PermissionDenied("Viewers watch runs; an administrator can make you an operator.")
    if request.method != "POST":
        initial = initial_from(presets.local_demo()) | {"submit_key": secrets.token_urlsafe(24)}
        return _page(request, RunForm(initial=initial), presets.local_demo())
    form = RunForm(request.POST)
    draft = form.draft()
    if draft is None:
        return _page(request, form, draft)
    # A form sent twice goes straight to its run: by now the rendezvous is taken, by itself. Asked
    # again after the checks, because the other request may have been quicker than they are.
    sent = Run.objects.filter(submit_key=form.cleaned_data["submit_key"])
    if not sent.exists() and not _reachable(form, draft) and not sent.exists():
        return _page(request, form, draft)
    assert isinstance(request.user, User)
    try:
        run = services.create_run(
            draft, owner=request.user, submit_key=form.cleaned_data["submit_key"]
        )
    except InvalidRun as error:
        form.point_at(error.field, error.message)
        return _page(request, form, draft)
    return redirect("run", run_id=run.pk)


@require_POST
def estimate(request: HttpRequest) -> JsonResponse:
    """What the form would do, and what is wrong with it, while it is being filled in."""
    if not selectors.may_submit(request.user):
        raise PermissionDenied
    form = RunForm(request.POST)
    draft = form.draft()
    body: dict[str, Any] = {"errors": form.errors, "estimate": None}
    if draft is not None:
        body["estimate"] = dataclasses.asdict(make_estimate(draft))
    return JsonResponse(body)


def _reachable(form: RunForm, draft: RunDraft) -> bool:
    """Ask the bucket and the data, so that what cannot work is said here and not after launch."""
    try:
        own = create.check_draft(draft, uuid.uuid4())
    except InvalidRun as error:
        form.point_at(error.field, error.message)
        return False
    for problem in preflight.check_data(draft.workload.data):
        form.point_at("data", problem)
    # The default is asked as a whole, so that a form leaves no folder for a run that never was.
    uri = own if draft.rendezvous else settings.DEFAULT_RENDEZVOUS
    for problem in preflight.check_rendezvous(uri, [pool.backend for pool in draft.pools]):
        form.point_at("rendezvous", problem)
    return not form.errors


def _page(request: HttpRequest, form: RunForm, draft: RunDraft | None) -> HttpResponse:
    sections = [
        {
            "name": name,
            "title": title,
            "basic": _rows(form, name, basic=True),
            "more": (more := _rows(form, name, basic=False)),
            "more_open": any(row["field"].errors for row in more),
        }
        for name, title in SECTIONS.items()
    ]
    context = {
        "form": form,
        "sections": sections,
        "sizes": [{"name": name, "shape": shape} for name, shape in GPT_SIZES.items()],
        "estimate": make_estimate(draft) if draft else None,
        "default_rendezvous": settings.DEFAULT_RENDEZVOUS,
        "error_list": [
            {"field": form[name] if name in form.fields else None, "errors": errors}
            for name, errors in form.errors.items()
        ],
    }
    return render(request, "runs/new.html", context, status=422 if form.errors else 200)


def _rows(form: RunForm, section: str, *, basic: bool) -> list[dict[str, Any]]:
    return [
        {"field": form[spec.name], "unit": spec.unit}
        for spec in setting_fields()
        if spec.section == section and spec.name in form.fields and (spec.name in BASIC) == basic
    ]
