"""The Alerts tab: an HTML fragment that the run page reloads when the number of alerts changes."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from dashboard.views.access import run_to_operate, run_to_see, signed_in
from runs import permissions
from runs.alerts import store as alerting


@require_safe
@never_cache
def alerts(request: HttpRequest, run_id: Any) -> HttpResponse:
    run = run_to_see(request, run_id)
    context = {
        "run": run,
        "alerts": alerting.alert_rows(run),
        "can_operate": permissions.can_operate(request.user, run),
    }
    return render(request, "runs/_alerts.html", context)


@require_POST
def acknowledge(request: HttpRequest, run_id: Any, alert_id: int) -> HttpResponse:
    run = run_to_operate(request, run_id)
    alert = get_object_or_404(run.alerts.select_related("run", "replica"), pk=alert_id)
    alerting.acknowledge(alert, actor=signed_in(request))
    if request.POST.get("next") == "alerts":
        return redirect("alerts")
    return redirect(f"{reverse('run', args=[run.pk])}?tab=alerts")
