"""The planner: the whole question is in the address, so a plan can be pasted to a colleague.

Without JavaScript the form is sent and the page answers; with it, ``planner.json`` is asked while
somebody types.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.forms.planner import PlannerForm, form_query
from diloco.protocol.setting_spec import SettingsError
from diloco.protocol.workload import GPT_SIZES
from runs import permissions
from runs.submit.planner import ENOUGH, Plan, plan

GROUPS = (
    ("Model", ("parameters", "tokens", "tokens_per_step", "step_s")),
    ("Group", ("num_replicas", "sync_every", "codec", "num_fragments", "overlap_steps",
               "reduce_plan", "min_quorum")),
    ("Machines", ("hardware", "usd_h", "mtbf_h", "replace_s")),
    ("Bucket", ("mbit_s", "latency_s", "egress_usd_gb")),
)  # fmt: skip
UNITS = {
    "step_s": "s", "num_replicas": "", "sync_every": "steps", "overlap_steps": "steps",
    "usd_h": "USD/h", "mtbf_h": "h", "replace_s": "s", "mbit_s": "Mbit/s", "latency_s": "s",
    "egress_usd_gb": "USD/GB",
}  # fmt: skip

HEADS = ("H", "Utilisation", "Goodput", "Efficiency", "Traffic", "Wall time", "Cost")


@require_safe
@never_cache
def planner(request: HttpRequest) -> HttpResponse:
    _may(request)
    form, found, links = _asked(request)
    context = {
        "form": form,
        "groups": [
            {
                "title": title,
                "fields": [{"field": form[name], "unit": UNITS.get(name, "")} for name in names],
            }
            for title, names in GROUPS
        ],
        "plan": found,
        "sizes": [{"name": name, "shape": shape} for name, shape in GPT_SIZES.items()],
        "enough": ENOUGH,
        "heads": HEADS,
        "errors": form.non_field_errors(),
        "may_submit": permissions.may_submit(request.user),
        **links,
    }
    return render(request, "planner/planner.html", context, status=200 if found else 422)


@require_safe
@never_cache
def planner_json(request: HttpRequest) -> JsonResponse:
    _may(request)
    form, found, links = _asked(request)
    return JsonResponse(
        {
            "plan": dataclasses.asdict(found) if found else None,
            "errors": {name: [str(e) for e in errors] for name, errors in form.errors.items()},
            **links,
        }
    )


def _may(request: HttpRequest) -> None:
    if not permissions.may_look(request.user):
        raise PermissionDenied("An administrator can give you a role.")


def _asked(request: HttpRequest) -> tuple[PlannerForm, Plan | None, dict[str, Any]]:
    form = PlannerForm(request.GET)
    question = form.question()
    if question is None:
        return form, None, {"query": form.query(), "use": ""}
    try:
        found = plan(question)
    except SettingsError as error:
        form.point_at(error.field, error.message)
        return form, None, {"query": form.query(), "use": ""}
    return (
        form,
        found,
        {"query": form.query(), "use": form_query(form, question, found.chosen.rounds)},
    )
