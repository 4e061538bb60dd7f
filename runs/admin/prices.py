"""Prices in the admin: what an hour of each hardware costs, as read when and where.

They are not edited here: the lists are the code's, with their dates, and what differs for a
deployment stands in its file, which is under somebody's version control.
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
    """Any staff may look, as at the tables."""
    now, lists = catalogue(), listed()
    tables = []
    for backend, table in now.tables.items():
        rows = []
        for hardware in now.of(backend):
            known = lists.get(backend, hardware.name)
            ours = known is None or (
                (known.price_usd_h, known.spot_price_usd_h)
                != (hardware.price_usd_h, hardware.spot_price_usd_h)
            )
            rows.append({"hardware": hardware, "ours": ours})
        tables.append({"label": BACKENDS.get(backend, backend), "table": table, "rows": rows})
    context = {
        **admin.site.each_context(request),
        "title": "Prices",
        "tables": tables,
        "file": settings.HARDWARE_FILE,
    }
    return TemplateResponse(request, "admin/runs/prices.html", context)
