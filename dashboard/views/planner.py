"""The planner page. The URL holds the whole input, so that a plan can be shared as a link.

Without JavaScript the form is submitted and the page shows the result; with JavaScript the page
requests ``planner.json`` while the user types.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from dashboard.forms.planner import GROUP_SETTINGS, PlannerForm, form_query
from dashboard.views.access import reader
from diloco.protocol.setting_spec import SettingsError
from diloco.protocol.workload import GPT_SIZES
from runs import permissions
from runs.submit.planner import ENOUGH, Plan, plan

GROUPS = (
    ("Model", ("parameters", "tokens", "tokens_per_step", "step_s")),
    (
        "Group",
        GROUP_SETTINGS,
    ),
    ("Machines", ("hardware", "usd_h", "mtbf_h", "replace_s")),
    ("Bucket", ("mbit_s", "latency_s", "egress_usd_gb")),
)
UNITS = {
    "step_s": "s",
    "num_replicas": "",
    "sync_every": "steps",
    "overlap_steps": "steps",
    "usd_h": "USD/h",
    "mtbf_h": "h",
    "replace_s": "s",
    "mbit_s": "Mbit/s",
    "latency_s": "s",
    "egress_usd_gb": "USD/GB",
}

HEADS = ("H", "Utilisation", "Goodput", "Efficiency", "Traffic", "Wall time", "Cost")


@require_safe
@never_cache
def planner(request: HttpRequest) -> HttpResponse:
    reader(request)
    form, result, links = _estimate(request)
    context = {
        "form": form,
        "groups": [
            {
                "title": title,
                "fields": [{"field": form[name], "unit": UNITS.get(name, "")} for name in names],
            }
            for title, names in GROUPS
        ],
        "plan": result,
        "sizes": [{"name": name, "shape": shape} for name, shape in GPT_SIZES.items()],
        "enough": ENOUGH,
        "heads": HEADS,
        "errors": form.non_field_errors(),
        "can_submit": permissions.can_submit(request.user),
        **links,
    }
    return render(request, "planner/planner.html", context, status=200 if result else 422)


@require_safe
@never_cache
def planner_json(request: HttpRequest) -> JsonResponse:
    reader(request)
    form, result, links = _estimate(request)
    return JsonResponse(
        {
            "plan": dataclasses.asdict(result) if result else None,
            "errors": {name: [str(e) for e in errors] for name, errors in form.errors.items()},
            **links,
        }
    )


def _estimate(request: HttpRequest) -> tuple[PlannerForm, Plan | None, dict[str, Any]]:
    form = PlannerForm(request.GET)
    plan_request = form.question()
    if plan_request is None:
        return form, None, {"query": form.query(), "use": ""}
    try:
        result = plan(plan_request)
    except SettingsError as error:
        form.point_at(error.field, error.message)
        return form, None, {"query": form.query(), "use": ""}
    return (
        form,
        result,
        {"query": form.query(), "use": form_query(form, plan_request, result.chosen.rounds)},
    )
