"""Prices of hardware and of traffic: every role sees them, administrators change them."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from dashboard.access import or_404
from dashboard.forms.settings import HardwarePriceForm, TrafficPriceForm
from dashboard.views.access import reader
from dashboard.views.settings_access import administrator, is_administrator
from runs.actions import prices as actions
from runs.backends.price_settings import Traffic
from runs.queries import prices as queries


@require_safe
@never_cache
def prices(request: HttpRequest) -> HttpResponse:
    """All prices by backend; ``?backend=`` shows one."""
    reader(request)
    rows = queries.price_rows()
    chosen = request.GET.get("backend", "")
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if chosen in ("", row["backend"]):
            tables.setdefault(row["backend_label"], []).append(row)
    traffic = {row["scheme"]: row for row in queries.traffic_rows()}
    context = {
        "tables": tables,
        "backends": list(dict.fromkeys((row["backend"], row["backend_label"]) for row in rows)),
        "chosen": chosen,
        "traffic": [
            {"scheme": scheme, "label": label, "row": traffic.get(scheme)}
            for scheme, label in actions.SCHEMES.items()
        ],
        "can_change": is_administrator(request),
    }
    return render(request, "settings/prices.html", context)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def hardware(request: HttpRequest, backend: str, name: str) -> HttpResponse:
    """Set the prices of one hardware; empty fields keep those of the catalogue."""
    actor = administrator(request)
    rows = queries.price_rows()
    row = or_404(next((r for r in rows if (r["backend"], r["hardware"]) == (backend, name)), None))
    initial = {n: row[f"set_{n}"] for n in ("price_usd_h", "spot_price_usd_h")}
    form = HardwarePriceForm(request.POST if request.method == "POST" else None, initial=initial)
    if request.method == "POST" and form.is_valid():
        actions.set_hardware_price(backend, name, **form.cleaned_data, actor=actor)
        messages.success(request, f"Price of {row['label']} saved. The next launches use it.")
        return redirect("settings-prices")
    context = {"form": form, "row": row}
    status = 422 if form.errors else 200
    return render(request, "settings/price.html", context, status=status)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def traffic(request: HttpRequest, scheme: str) -> HttpResponse:
    """Set what traffic with a kind of bucket costs, or remove it."""
    actor = administrator(request)
    if scheme not in actions.SCHEMES:
        raise Http404
    row = next((r for r in queries.traffic_rows() if r["scheme"] == scheme), None)
    if request.method == "POST" and request.POST.get("remove"):
        actions.set_traffic_price(scheme, None, actor=actor)
        messages.success(request, f"Traffic with {scheme}:// is no longer part of the cost.")
        return redirect("settings-prices")
    form = TrafficPriceForm(request.POST if request.method == "POST" else None, initial=row)
    if request.method == "POST" and form.is_valid():
        actions.set_traffic_price(scheme, Traffic(**form.cleaned_data), actor=actor)
        messages.success(request, f"Price of traffic with {scheme}:// saved.")
        return redirect("settings-prices")
    context = {"form": form, "row": row, "scheme": scheme, "label": actions.SCHEMES[scheme]}
    status = 422 if form.errors else 200
    return render(request, "settings/traffic.html", context, status=status)
