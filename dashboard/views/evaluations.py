"""The Evaluations tab of a run: what is measured of its checkpoints, and the results."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from dashboard.access import or_404
from dashboard.forms import PoolChoices
from dashboard.forms.evaluation import EvaluationForm, initial_of_plan
from dashboard.views.access import act, run_to_operate, run_to_see, signed_in, to_tab
from runs import permissions
from runs.actions import evaluations as actions
from runs.exceptions import ActionRefused, InvalidRun
from runs.models import EvaluationPlan, Run
from runs.queries import evaluations as queries
from runs.submit.evaluation_plans import draft_of


@require_safe
@never_cache
def evaluations(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Content of the tab. The page reloads it as evaluations end."""
    run = run_to_see(request, run_id)
    context = {"run": run, "can_operate": permissions.can_operate(request.user, run)}
    return render(request, "runs/_evaluations.html", context | evaluation_context(run))


def evaluation_context(run: Run) -> dict[str, Any]:
    """Template context of the tab. Four queries."""
    tables = queries.tables(run)
    return {
        "evaluation_tables": tables,
        "evaluation_charts": [chart for table in tables for chart in table["charts"]],
    }


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def add(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The form of a new evaluation."""
    return _form(request, run_to_operate(request, run_id), None)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def change(request: HttpRequest, run_id: Any, name: str) -> HttpResponse:
    """The form of an evaluation that the run has."""
    run = run_to_operate(request, run_id)
    return _form(request, run, or_404(queries.plan_named(run, name)))


def _form(request: HttpRequest, run: Run, plan: EvaluationPlan | None) -> HttpResponse:
    user = signed_in(request)
    form = EvaluationForm(
        request.POST if request.method == "POST" else None,
        choices=PoolChoices.load(user),
        initial=initial_of_plan(draft_of(plan)) if plan else None,
        is_changed=plan is not None,
    )
    if request.method == "POST" and form.is_valid():
        try:
            if plan is None and queries.plan_named(run, form.cleaned_data["name"].strip()):
                raise InvalidRun("name", "enter another name; the run has this one")
            saved = actions.save_plan(run, form.draft(), actor=user)
        except InvalidRun as error:
            form.place(error.field, error.message)
        else:
            messages.success(request, f"Evaluation {saved} {'saved' if plan else 'added'}.")
            return to_tab(run.pk, "evaluations")
    context = {"run": run, "form": form, "plan": plan}
    status = 422 if form.errors else 200
    return render(request, "runs/evaluation_plan.html", context, status=status)


@require_POST
def remove(request: HttpRequest, run_id: Any, name: str) -> HttpResponse:
    run, user = run_to_operate(request, run_id), signed_in(request)
    act(request, run, name, lambda: actions.remove_plan(run, name, actor=user), "removed")
    return to_tab(run.pk, "evaluations")


@require_POST
def evaluate(request: HttpRequest, run_id: Any, name: str) -> HttpResponse:
    """Evaluate ``round``, by default the newest checkpoint; ``cancel`` cancels that."""
    run, user = run_to_operate(request, run_id), signed_in(request)
    text = request.POST.get("round", "")
    try:
        number = _round(text)
        if request.POST.get("cancel"):
            changed = actions.cancel(run, name, number or 0, actor=user)
            done, same = "is being cancelled", "is not active"
        else:
            changed = actions.evaluate(run, name, round=number, actor=user)
            done, same = "is queued", "is queued, running or done already"
    except ActionRefused as error:
        messages.error(request, f"{name}: {error}.")
    else:
        what = f"{name} of {'the newest checkpoint' if number is None else f'round {number}'}"
        (messages.success if changed else messages.info)(
            request, f"{what} {done if changed else same}."
        )
    return to_tab(run.pk, "evaluations")


def _round(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 9):
        raise ActionRefused(f"expected the number of a round, found {text[:20]!r}")
    return int(text)
