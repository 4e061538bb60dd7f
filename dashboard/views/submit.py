"""The submit form: prefilled with the local demo, validated per field, one run per form.

The buttons *Add a pool*, *Remove* and *Test* also work without JavaScript: they post the form,
which comes back with its values. *Dry run* runs all checks of a launch and shows what would be
launched, but creates nothing. Enter in a field triggers a dry run, so that it cannot cost money.
"""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.forms import PoolChoices, PoolForm, RunForm, initial_from, option_help
from dashboard.forms.prefill import from_query
from dashboard.presentation.estimate import EstimateView
from dashboard.presentation.estimate import estimate as make_estimate
from dashboard.views import submit_source
from dashboard.views.access import reader, signed_in
from diloco.protocol.settings import SECTIONS, setting_fields
from diloco.protocol.workload import GPT_SIZES
from executors.base import Problem
from runs import permissions
from runs.backends import health, storage_health
from runs.exceptions import InvalidRun
from runs.submit import create, preflight, run_draft, throughput_history
from runs.submit.run_draft import PoolDraft, RunDraft

BASIC = frozenset(
    [
        "sync_every",
        "total_rounds",
        "max_tokens",
        "codec",
        "outer_lr",
        "outer_momentum",
        "inner_lr",
        "batch_size",
        "warmup_steps",
        "min_quorum",
        "grace_s",
        "eval_every",
        "checkpoint_every",
    ]
)
"""Settings that are always visible; *More* shows the others."""

PASSED = "Works"
BUCKET_PASSED = "Works: wrote, read, listed, created once and deleted"


def _starting_draft(choices: PoolChoices) -> RunDraft:
    """The local demo, or another backend for a user who cannot use the local one."""
    draft = run_draft.local_demo()
    if choices.first == PoolDraft():
        return draft
    [pool] = draft.pools
    return dataclasses.replace(draft, pools=(dataclasses.replace(choices.first, count=pool.count),))


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    if not permissions.can_submit(request.user):
        reader(request)
        raise PermissionDenied(
            "Viewers can't submit runs. Ask an administrator for the operator role."
        )
    user = signed_in(request)
    if request.method != "POST":
        query = submit_source.address(request.GET.dict())
        if query is not None:
            return redirect(f"{request.path}?{query}")
        template = submit_source.draft_of(request)
        choices = PoolChoices.load(user)
        initial = initial_from(template or _starting_draft(choices))
        initial["submit_key"] = secrets.token_urlsafe(24)
        # Query parameters can be invalid: the browser then requests the estimate.
        draft = None if request.GET else _starting_draft(choices)
        if template is None:
            initial = from_query(initial, request.GET.dict())
        return _page(request, RunForm(initial=initial, choices=choices), draft)
    form = RunForm(request.POST, request.FILES, choices=PoolChoices.load(user))
    if changed := _changed(request, form):
        return changed
    draft = form.draft()
    if "dry_run" in request.POST:
        passes = draft is not None and _passes(form, draft, user)
        return _page(request, form, draft if passes else None, dry_run=passes)
    if draft is None:
        return _page(request, form, draft)
    try:
        run = create.create_run(
            draft,
            owner=user,
            submit_key=form.cleaned_data["submit_key"],
            preflight=partial(preflight.require, over_budget=form.cleaned_data["over_budget"]),
        )
    except InvalidRun as error:
        _show(form, error.problems)
        return _page(request, form, draft)
    return redirect("run", run_id=run.pk)


@require_POST
def estimate(request: HttpRequest) -> JsonResponse:
    """Estimate and errors of the form while it is being filled in."""
    if not permissions.can_submit(request.user):
        raise PermissionDenied
    form = RunForm(request.POST, request.FILES)
    draft = form.draft()
    body: dict[str, Any] = {"errors": form.all_errors, "estimate": None}
    if draft is not None:
        body["estimate"] = dataclasses.asdict(_estimate(draft))
    return JsonResponse(body)


@require_POST
def test(request: HttpRequest) -> HttpResponse:
    """A *Test* button. ``test`` is ``rendezvous`` or ``pools.<index>``. Nothing is started."""
    if not permissions.can_submit(request.user):
        raise PermissionDenied
    form = RunForm(request.POST, request.FILES)
    what = request.POST.get("test", "")
    if _tested_pool(form, what) is None and what != "rendezvous":
        return HttpResponseBadRequest("expected test to be rendezvous or pools.<index>")
    message = _test(form, what, signed_in(request))
    return JsonResponse({"ok": bool(message), "message": message, "errors": _errors_of(form, what)})


def _changed(request: HttpRequest, form: RunForm) -> HttpResponse | None:
    """The form again, for buttons that do not launch; None for other buttons."""
    tested: dict[str, str] = {}
    if request.FILES:
        form.is_valid()  # stores the uploaded file
    if "add_pool" in request.POST:
        form.add_pool()
    elif "remove_pool" in request.POST:
        form.remove_pool(request.POST["remove_pool"])
    elif "test" in request.POST:
        what = request.POST["test"]
        tested[what] = _test(form, what, signed_in(request))
        errors = _errors_of(form, what)
        form.forget_errors()
        form.show_errors(errors)
    elif submit_source.searched(request.POST.dict()):
        pass  # the page searches the source lists
    elif "restore" in request.POST:
        if create.is_submitted(request.POST.get("submit_key", "")):
            return redirect("run-new")  # it was launched after all: start a new form
        messages.info(request, "Your entries from before you signed in. The run is not launched.")
    else:
        return None
    if not tested:
        form.forget_errors()
    return _page(request, form, None, tested=tested, status=200)


# Test buttons.


def _tested_pool(form: RunForm, what: str) -> PoolForm | None:
    return next((pool for pool in form.pools if what == f"pools.{pool.index}"), None)


def _test(form: RunForm, what: str, user: User) -> str:
    """The success message of a test; empty if it failed, with errors at the fields."""
    pool = _tested_pool(form, what)
    if pool is None:
        return _test_bucket(form, user)
    if not pool.is_valid():
        return ""
    draft = pool.draft()
    index = form.pools.index(pool)
    try:
        create.check_pool(draft, index)
    except InvalidRun as error:
        _show(form, error.problems)
        return ""
    result = preflight.check_pool_connection(draft, index)
    _show(form, result.problems)
    return "" if result.problems else f"{PASSED}: {result.account}" if result.account else PASSED


def _test_bucket(form: RunForm, user: User) -> str:
    form.is_valid()
    if set(form.errors) & {"rendezvous", "store_credential"}:
        return ""
    wanted = form.cleaned_data["rendezvous"].strip()
    credential = form.cleaned_data["store_credential"]
    try:
        own = create.free_prefix(wanted, uuid.uuid4(), viewer=user)
    except InvalidRun as error:
        _show(form, error.problems)
        return ""
    result = preflight.check_bucket_connection(
        own,
        [pool.draft() for pool in form.pools if pool.is_valid()],
        store_credential=int(credential) if credential else None,
    )
    _show(form, result.problems)
    return "" if result.problems else BUCKET_PASSED


def _show(form: RunForm, problems: Sequence[Problem]) -> None:
    for problem in problems:
        form.point_at(problem.field, problem.message)


def _errors_of(form: RunForm, what: str) -> dict[str, list[str]]:
    """Errors of the tested fields only: the rest of the form can still be empty."""
    return {
        name: errors
        for name, errors in form.all_errors.items()
        if name in (what, "store_credential") or name.startswith(f"{what}.")
    }


def _passes(form: RunForm, draft: RunDraft, user: User) -> bool:
    """Whether a launch would be accepted; otherwise with errors at their fields."""
    problems = preflight.check(draft, user, over_budget=form.cleaned_data["over_budget"])
    _show(form, problems)
    return not problems


def _estimate(draft: RunDraft) -> EstimateView:
    return make_estimate(draft, throughput_history.known_rates(draft.workload.to_dict()))


def _page(
    request: HttpRequest,
    form: RunForm,
    draft: RunDraft | None,
    *,
    tested: dict[str, str] | None = None,
    status: int | None = None,
    dry_run: bool = False,
) -> HttpResponse:
    """``dry_run``: the draft passed all checks of a launch."""
    errors = form.all_errors
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
        "storage": storage_health.storage_problem(),
        "silent_since": health.silent_since(),
        "pools": [
            {"form": pool, "result": (tested or {}).get(f"pools.{pool.index}")}
            for pool in form.pools
        ],
        "option_help": option_help(),
        "pools_alone": len(form.pools) == 1,
        "bucket_result": (tested or {}).get("rendezvous"),
        "sections": sections,
        "sizes": [{"name": name, "shape": shape} for name, shape in GPT_SIZES.items()],
        "estimate": _estimate(draft) if draft else None,
        "default_rendezvous": settings.DEFAULT_RENDEZVOUS,
        "error_list": [
            {"field": form.input_of(name), "errors": messages_of_field}
            for name, messages_of_field in errors.items()
        ],
        "launch_refused": status is None,
        "source": submit_source.offered(request),
        "dry_run": draft if dry_run else None,
    }
    return render(request, "runs/new.html", context, status=status or (422 if errors else 200))


def _rows(form: RunForm, section: str, *, basic: bool) -> list[dict[str, Any]]:
    return [
        {"field": form[spec.name], "unit": spec.unit}
        for spec in setting_fields()
        if spec.section == section and spec.name in form.fields and (spec.name in BASIC) == basic
    ]
