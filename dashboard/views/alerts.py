"""Acknowledge an alert of a run."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from dashboard.views.access import run_to_operate, signed_in, to_tab
from runs.alerts import store as alerting


@require_POST
def acknowledge(request: HttpRequest, run_id: Any, alert_id: int) -> HttpResponse:
    run = run_to_operate(request, run_id)
    alert = get_object_or_404(run.alerts.select_related("run", "replica"), pk=alert_id)
    alerting.acknowledge(alert, actor=signed_in(request))
    if request.POST.get("next") == "alerts":
        return redirect("alerts")
    return to_tab(run.pk, "activity&source=alert")
