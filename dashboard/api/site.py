"""The API object: routers, error handlers, authentication and URL patterns."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, re_path
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.errors import ValidationError, ValidationErrorContext

from dashboard.api import (
    about,
    accounts,
    actions,
    alerts,
    boards,
    bulk,
    evaluations,
    exports,
    fleet,
    lifecycle,
    list_tools,
    money,
    people,
    problems,
    records,
    run_page,
    runs,
    search,
    sweeps,
    tools,
    trackers,
    views,
)
from dashboard.api.auth import AUTH
from dashboard.api.parser import BodyParser

VERSION = "1"


class Api(NinjaAPI):
    def validation_error_from_error_contexts(
        self, error_contexts: list[ValidationErrorContext[Any]]
    ) -> ValidationError:
        """Keep the invalid input in the error, which ninja drops."""
        errors_found: list[dict[str, Any]] = []
        for context in error_contexts:
            source = context.model.__ninja_param_source__
            errors = context.pydantic_validation_error.errors(include_url=False)
            errors_found += [{**error, "loc": (source, *error["loc"])} for error in errors]
        return ValidationError(errors_found)


api = Api(
    title="Archipelago",
    version=VERSION,
    description="Submit and control runs; read their replicas, rounds, charts and logs.",
    urls_namespace="api",
    docs_url=None,  # the docs page loads scripts from other hosts
    auth=AUTH,
    parser=BodyParser(),
)
problems.install(api)
for part in (
    *(about, runs, actions, lifecycle, records, run_page, exports, tools, views, fleet),
    *(alerts, search, money, accounts, people, trackers, sweeps, evaluations),
    *(list_tools, boards, bulk),
):
    api.add_router("", part.router)


def _open(patterns: list[Any]) -> list[Any]:
    """Let the API answer 401. The login middleware would redirect programs to the sign-in page."""
    for pattern in patterns:
        assert isinstance(pattern, URLPattern)
        login_not_required(pattern.callback)
    return patterns


@login_not_required
@csrf_exempt
def not_found(request: HttpRequest, rest: str) -> HttpResponse:
    """Answer unknown paths in JSON too."""
    return problems.answer(request, 404, f"no operation {request.method} /api/{rest}")


_patterns, _app_name, _namespace = api.urls
urlpatterns = ([*_open(_patterns), re_path(r"(?P<rest>(?s:.+))", not_found)], _app_name, _namespace)
