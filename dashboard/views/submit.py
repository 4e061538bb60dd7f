"""The submit form: prefilled with the local demo, validated per field, one run per form.

The buttons *Add a pool*, *Remove* and *Test* also work without JavaScript: they post the form,
which comes back with its values. *Dry run* runs all checks of a launch and shows what would be
launched, but creates nothing. Enter in a field triggers a dry run, so that it cannot cost money.
"""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.shortcuts import redirect
from django.template.loader import render_to_string
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.api.document_text import read_document
from dashboard.forms import PoolChoices, PoolForm, RunForm, initial_from
from dashboard.forms.pasted import OMITTED, fill, posted
from dashboard.forms.prefill import from_query
from dashboard.forms.run import FIELDS
from dashboard.parameters import text_of
from dashboard.templatetags.budgets import own_budgets
from dashboard.views import submit_source
from dashboard.views.access import reader, signed_in
from dashboard.views.submit_page import page, preview, show
from runs import permissions
from runs.exceptions import InvalidRun
from runs.models import Run
from runs.submit import create, names, pool_check, preflight, run_draft, sweeps
from runs.submit.run_draft import PoolDraft, RunDraft

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
        if template is not None and template.workload.kind not in FIELDS:
            messages.error(request, _without_form(template.workload.kind))
            return redirect("run", run_id=submit_source.cloned(request.GET))
        choices = PoolChoices.load(user)
        initial = initial_from(template or _starting_draft(choices))
        initial["submit_key"] = secrets.token_urlsafe(24)
        initial["cloned"] = submit_source.cloned(request.GET)
        if template is None or not initial["cloned"]:
            initial["name"] = names.suggest(initial["name"])
        # Query parameters can be invalid: the browser then requests the estimate.
        draft = template if template or request.GET else _starting_draft(choices)
        if template is None:
            initial = from_query(initial, request.GET.dict())
        return page(request, RunForm(initial=initial, choices=choices), draft)
    form = RunForm(request.POST, request.FILES, choices=PoolChoices.load(user))
    if changed := _changed(request, form):
        return changed
    draft = form.draft()
    if "dry_run" in request.POST:
        passes = draft is not None and _passes(form, draft, user)
        return page(request, form, draft if passes else None, dry_run=passes)
    if draft is None:
        return page(request, form, draft)
    try:
        return _launch(form, draft, user)
    except InvalidRun as error:
        show(form, error.problems)
        return page(request, form, draft)


def _without_form(kind: str) -> str:
    return (
        f"The form has no fields for workloads of kind {kind}. Copy the run with archipelago clone."
    )


def _launch(form: RunForm, draft: RunDraft, user: User) -> HttpResponse:
    """Create the run, or the sweep. Raises :class:`InvalidRun`."""
    key, over_budget = form.cleaned_data["submit_key"], form.cleaned_data["over_budget"]
    sweep = form.sweep_of(draft)
    if sweep is None:
        require = partial(preflight.require, over_budget=over_budget)
        run = create.create_run(draft, owner=user, submit_key=key, preflight=require)
        return redirect("run", run_id=run.pk)
    row = sweeps.create_sweep(
        sweep,
        owner=user,
        submit_key=key,
        over_budget=over_budget,
        preflight=preflight.check_runs,
    )
    return redirect("sweep", sweep_id=row.pk)


@require_POST
def estimate(request: HttpRequest) -> JsonResponse:
    """Estimate and errors of the form while it is being filled in."""
    if not permissions.can_submit(request.user):
        raise PermissionDenied
    form = RunForm(request.POST, request.FILES)
    draft = form.draft()
    shown: dict[str, Any] = dict.fromkeys(("estimate", "changes", "sweep", "command"))
    if draft is not None:
        try:
            shown = dataclasses.asdict(preview(form, draft))
        except InvalidRun as error:
            show(form, error.problems)
        context = own_budgets(signed_in(request), " ".join(draft.tags))
        shown["budgets"] = render_to_string("partials/budgets.html", context)
    return JsonResponse({"errors": form.all_errors, **shown})


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
    elif "add_evaluation" in request.POST:
        form.add_evaluation()
    elif "remove_evaluation" in request.POST:
        form.remove_evaluation(request.POST["remove_evaluation"])
    elif "test" in request.POST:
        what = request.POST["test"]
        tested[what] = _test(form, what, signed_in(request))
        errors = _errors_of(form, what)
        form.forget_errors()
        form.show_errors(errors)
    elif "paste" in request.POST:
        form, draft = _pasted(form, request.POST)
        return page(request, form, draft, status=200)
    elif submit_source.searched(request.POST.dict()):
        pass  # the page searches the source lists
    elif "restore" in request.POST:
        if create.is_submitted(Run, text_of(request.POST, "submit_key")):
            return redirect("run-new")  # it was launched after all: start a new form
        messages.info(request, "Your entries from before you signed in. The run is not launched.")
    else:
        return None
    if not tested:
        form.forget_errors()
    return page(request, form, None, tested=tested, status=200)


def _pasted(form: RunForm, sent: Mapping[str, Any]) -> tuple[RunForm, RunDraft | None]:
    """The form filled in from the posted document, with its errors; the form as it was, with an
    error at the document, if that cannot be read."""
    text = sent.get("document", "")
    try:
        document = read_document(text)
    except ValueError as error:
        form.forget_errors()
        form.show_errors({"document": [str(error)]})
        return form, None
    defaults = posted(RunForm(initial=initial_from(OMITTED), choices=form.choices))
    values, problems = fill(document, defaults)
    values["submit_key"] = sent.get("submit_key", "")
    if problems:
        values["document"] = text
    filled = RunForm(values, choices=form.choices)
    draft = filled.draft()
    if problems:
        found = [f"{each.field}: {each.message}" for each in problems]
        filled.show_errors({"document": found})
    return filled, draft


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
        pool_check.check_pool(draft, index)
    except InvalidRun as error:
        show(form, error.problems)
        return ""
    result = preflight.check_pool_connection(draft, index)
    show(form, result.problems)
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
        show(form, error.problems)
        return ""
    result = preflight.check_bucket_connection(
        own,
        [pool.draft() for pool in form.pools if pool.is_valid()],
        store_credential=int(credential) if credential else None,
    )
    show(form, result.problems)
    return "" if result.problems else BUCKET_PASSED


def _errors_of(form: RunForm, what: str) -> dict[str, list[str]]:
    """Errors of the tested fields only: the rest of the form can still be empty."""
    return {
        name: errors
        for name, errors in form.all_errors.items()
        if name in (what, "store_credential") or name.startswith(f"{what}.")
    }


def _passes(form: RunForm, draft: RunDraft, user: User) -> bool:
    """Whether a launch would be accepted; otherwise with errors at their fields."""
    over_budget = form.cleaned_data["over_budget"]
    try:
        if sweep := form.sweep_of(draft):
            checks = preflight.check_runs
            sweeps.check_sweep(sweep, user, over_budget=over_budget, preflight=checks)
            return True
    except InvalidRun as error:
        show(form, error.problems)
        return False
    problems = preflight.check(draft, user, over_budget=over_budget)
    show(form, problems)
    return not problems
