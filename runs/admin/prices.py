"""The admin's list of hourly hardware prices, with their source and date.

Prices cannot be edited here: the defaults are part of the code, and a deployment overrides them in
a file under version control.
"""

from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.views.decorators.http import require_safe

from executors.registry import BACKENDS
from runs.backends.executors import catalogue, listed


@require_safe
def prices(request: HttpRequest) -> HttpResponse:
    """All staff can view the list."""
    now, lists = catalogue(), listed()
    tables = []
    for backend, table in now.tables.items():
        rows = []
        for hardware in now.of(backend):
            default = lists.get(backend, hardware.name)
            is_override = default is None or (
                (default.price_usd_h, default.spot_price_usd_h)
                != (hardware.price_usd_h, hardware.spot_price_usd_h)
            )
            rows.append({"hardware": hardware, "ours": is_override})
        tables.append({"label": BACKENDS.get(backend, backend), "table": table, "rows": rows})
    context = {
        **admin.site.each_context(request),
        "title": "Prices",
        "tables": tables,
        "file": settings.HARDWARE_FILE,
    }
    return TemplateResponse(request, "admin/runs/prices.html", context)
