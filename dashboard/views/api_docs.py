"""The API reference ``/api/docs``, rendered from the API's own OpenAPI document."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from dashboard.api import api
from dashboard.presentation import api_reference


@lru_cache(maxsize=1)
def reference() -> api_reference.Reference:
    """The reference of this version; the document does not change while the server runs."""
    schema: Any = api.get_openapi_schema(path_prefix="/api/")
    return api_reference.reference(schema)


@require_safe
def docs(request: HttpRequest) -> HttpResponse:
    """Every operation with its parameters, body and answers, and examples for curl and the command
    line. Every signed-in user can read it."""
    server = f"{request.scheme}://{request.get_host()}"
    context = {"reference": reference(), "server": server}
    return render(request, "api/docs.html", context)
