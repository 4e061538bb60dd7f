"""The submit form: prefilled with the local demo, checked at the field, one run per form.

Buttons that do not launch (*Add a pool*, *Remove*, *Test*) work without JavaScript as well: then
they send the form, and it comes back as it was typed. *Dry run* always does: it checks all that a
launch checks, shows what would be launched, and makes nothing. It is also what Enter in a field
presses, which must not cost money.
"""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.forms import PoolChoices, PoolForm, RunForm, initial_from
from dashboard.forms.prefill import from_query
from dashboard.presentation.estimate import Estimate
from dashboard.presentation.estimate import estimate as make_estimate
from dashboard.views import submit_source
from diloco.protocol.settings import SECTIONS, setting_fields
from diloco.protocol.workload import GPT_SIZES
from runs import permissions
from runs.actions import replicas_and_pools
from runs.exceptions import InvalidRun
from runs.models import Run
from runs.submit import create, preflight, run_draft, throughput_history
from runs.submit.preflight import Answer
from runs.submit.run_draft import PoolDraft, RunDraft

BASIC = frozenset(
    {"sync_every", "total_rounds", "max_tokens", "codec", "outer_lr", "outer_momentum", "inner_lr",
     "batch_size", "warmup_steps", "min_quorum", "grace_s", "eval_every", "checkpoint_every"}
)  # fmt: skip
"""Settings shown at once; the others wait behind *More*."""

WELL = "Works"
BUCKET_WELL = "Works: wrote, read, listed, created once and deleted"


def _starting_draft(choices: PoolChoices) -> RunDraft:
    """The local demo; on another backend for a user without permission for the local one."""
    draft = run_draft.local_demo()
    if choices.first == PoolDraft():
        return draft
    [pool] = draft.pools
    return dataclasses.replace(draft, pools=(dataclasses.replace(choices.first, count=pool.count),))


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    if not permissions.may_submit(request.user):
        looks = permissions.may_look(request.user)
        raise PermissionDenied(
            "Viewers watch runs; an administrator can make you an operator."
            if looks
            else "Your account has no role yet; an administrator can give you one."
        )
    assert isinstance(request.user, User)
    if request.method != "POST":
        asked = submit_source.address(request.GET.dict())
        if asked is not None:
            return redirect(f"{request.path}?{asked}")
        template = submit_source.draft_of(request)
        choices = PoolChoices.load(request.user)
        initial = initial_from(template or _starting_draft(choices))
        initial["submit_key"] = secrets.token_urlsafe(24)
        # What an address fills in may be wrong, so its estimate is left to the browser to ask for.
        draft = None if request.GET else _starting_draft(choices)
        if template is None:
            initial = from_query(initial, request.GET.dict())
        return _page(request, RunForm(initial=initial, choices=choices), draft)
    form = RunForm(request.POST, request.FILES, choices=PoolChoices.load(request.user))
    if changed := _changed(request, form):
        return changed
    draft = form.draft()
    if "dry_run" in request.POST:
        passes = draft is not None and _passes(form, draft, _user(request))
        return _page(request, form, draft if passes else None, dry_run=passes)
    if draft is None:
        return _page(request, form, draft)
    # A form sent twice goes straight to its run: by now the rendezvous is taken, by itself. Asked
    # again after the checks, because the other request may have been quicker than they are.
    sent = Run.objects.filter(submit_key=form.cleaned_data["submit_key"])
    if not sent.exists() and not _passes(form, draft, _user(request)) and not sent.exists():
        return _page(request, form, draft)
    try:
        run = replicas_and_pools.create_run(
            draft, owner=request.user, submit_key=form.cleaned_data["submit_key"]
        )
    except InvalidRun as error:
        form.point_at(error.field, error.message)
        return _page(request, form, draft)
    return redirect("run", run_id=run.pk)


@require_POST
def estimate(request: HttpRequest) -> JsonResponse:
    """What the form would do, and what is wrong with it, while it is being filled in."""
    if not permissions.may_submit(request.user):
        raise PermissionDenied
    form = RunForm(request.POST, request.FILES)
    draft = form.draft()
    body: dict[str, Any] = {"errors": form.all_errors, "estimate": None}
    if draft is not None:
        body["estimate"] = dataclasses.asdict(_estimate(draft))
    return JsonResponse(body)


@require_POST
def test(request: HttpRequest) -> HttpResponse:
    """A *Test* button: ``test`` is ``rendezvous`` or ``pools.<index>``. Nothing is started."""
    if not permissions.may_submit(request.user):
        raise PermissionDenied
    form = RunForm(request.POST, request.FILES)
    what = request.POST.get("test", "")
    if _tested_pool(form, what) is None and what != "rendezvous":
        return HttpResponseBadRequest("expected test to be rendezvous or a row of pools")
    said = _test(form, what, _user(request))
    return JsonResponse({"ok": bool(said), "said": said, "errors": _errors_of(form, what)})


def _changed(request: HttpRequest, form: RunForm) -> HttpResponse | None:
    """The form again, for the buttons that do not launch."""
    tested: dict[str, str] = {}
    if request.FILES:
        form.is_valid()  # which keeps what was uploaded
    if "add_pool" in request.POST:
        form.add_pool()
    elif "remove_pool" in request.POST:
        form.remove_pool(request.POST["remove_pool"])
    elif "test" in request.POST:
        what = request.POST["test"]
        tested[what] = _test(form, what, _user(request))
        errors = _errors_of(form, what)
        form.forget_errors()
        form.show_errors(errors)
    elif submit_source.searched(request.POST.dict()):
        pass  # what is offered is the page's
    elif "restore" in request.POST:
        if Run.objects.filter(submit_key=request.POST.get("submit_key", "")).exists():
            return redirect("run-new")  # launched after all: the next form is a new one
        messages.info(request, "Filled in as you sent it before you signed in; not launched.")
    else:
        return None
    if not tested:
        form.forget_errors()
    return _page(request, form, None, tested=tested, status=200)


def _user(request: HttpRequest) -> User:
    assert isinstance(request.user, User)
    return request.user


# Test buttons.


def _tested_pool(form: RunForm, what: str) -> PoolForm | None:
    return next((pool for pool in form.pools if what == f"pools.{pool.index}"), None)


def _test(form: RunForm, what: str, user: User) -> str:
    """What to say of a test that went well; '' with errors at their fields of one that did not."""
    pool = _tested_pool(form, what)
    if pool is None:
        return _test_bucket(form, user)
    if not pool.is_valid():
        return ""
    draft = pool.draft()
    place = form.pools.index(pool)
    try:
        create.check_pool(draft, place)
    except InvalidRun as error:
        form.point_at(error.field, error.message)
        return ""
    answer = preflight.try_pool(draft, place)
    _show(form, answer)
    return "" if answer.findings else f"{WELL}: {answer.said}" if answer.said else WELL


def _test_bucket(form: RunForm, user: User) -> str:
    form.is_valid()
    if set(form.errors) & {"rendezvous", "store_credential"}:
        return ""
    wanted = form.cleaned_data["rendezvous"].strip()
    credential = form.cleaned_data["store_credential"]
    try:
        own = create.free_prefix(wanted, uuid.uuid4(), viewer=user)
    except InvalidRun as error:
        form.point_at(error.field, error.message)
        return ""
    answer = preflight.try_bucket(
        own,
        [pool.draft() for pool in form.pools if pool.is_valid()],
        store_credential=int(credential) if credential else None,
    )
    _show(form, answer)
    return "" if answer.findings else BUCKET_WELL


def _show(form: RunForm, answer: Answer) -> None:
    for finding in answer.findings:
        form.point_at(finding.field, finding.message)


def _errors_of(form: RunForm, what: str) -> dict[str, list[str]]:
    """Errors of what was tested; the rest of the form may not be filled in yet."""
    return {
        name: errors
        for name, errors in form.all_errors.items()
        if name in (what, "store_credential") or name.startswith(f"{what}.")
    }


# Launching.


def _passes(form: RunForm, draft: RunDraft, user: User) -> bool:
    """Check it, and ask the backends, the bucket and the data, so that what cannot work is said
    here and not after launch."""
    try:
        create.check_local(draft, user)
        own = create.check_draft(draft, uuid.uuid4(), viewer=user)
    except InvalidRun as error:
        form.point_at(error.field, error.message)
        return False
    findings = preflight.check_run(
        draft,
        uri=own,
        rates=throughput_history.known_rates(draft.workload.to_dict()),
        over_budget=form.cleaned_data["over_budget"],
    )
    for finding in findings:
        form.point_at(finding.field, finding.message)
    return not findings


def _estimate(draft: RunDraft) -> Estimate:
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
    """``dry_run``: the draft was checked as for a launch, and would be launched."""
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
        "pools": [
            {"form": pool, "said": (tested or {}).get(f"pools.{pool.index}")} for pool in form.pools
        ],
        "pools_alone": len(form.pools) == 1,
        "bucket_said": (tested or {}).get("rendezvous"),
        "sections": sections,
        "sizes": [{"name": name, "shape": shape} for name, shape in GPT_SIZES.items()],
        "estimate": _estimate(draft) if draft else None,
        "default_rendezvous": settings.DEFAULT_RENDEZVOUS,
        "error_list": [
            {"field": form.input_of(name), "errors": said} for name, said in errors.items()
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
