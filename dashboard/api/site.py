"""Operations put together, and what holds for all of them."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, re_path
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.errors import ValidationError, ValidationErrorContext

from dashboard.api import about, actions, exports, life, problems, records, runs, tools, views
from dashboard.api.auth import AUTH
from dashboard.api.parser import BodyParser

VERSION = "1"


class Api(NinjaAPI):
    def validation_error_from_error_contexts(
        self, error_contexts: list[ValidationErrorContext[Any]]
    ) -> ValidationError:
        """With what was found, which ninja leaves out."""
        found: list[dict[str, Any]] = []
        for context in error_contexts:
            source = context.model.__ninja_param_source__
            errors = context.pydantic_validation_error.errors(include_url=False)
            found += [{**error, "loc": (source, *error["loc"])} for error in errors]
        return ValidationError(found)


api = Api(
    title="Archipelago",
    version=VERSION,
    description="Runs, their replicas, rounds, curves and logs; submitting and steering them.",
    urls_namespace="api",
    docs_url=None,  # its page loads scripts from elsewhere
    auth=AUTH,
    parser=BodyParser(),
)
problems.install(api)
for part in (about, runs, actions, life, records, exports, tools, views):
    api.add_router("", part.router)


def _open(patterns: list[Any]) -> list[Any]:
    """Let the API say 401 itself: the middleware would send a program to the sign-in page."""
    for pattern in patterns:
        assert isinstance(pattern, URLPattern)
        login_not_required(pattern.callback)
    return patterns


@login_not_required
@csrf_exempt
def nothing(request: HttpRequest, rest: str) -> HttpResponse:
    """What is no call of the API, in JSON as well."""
    return problems.answer(request, 404, f"there is no call {request.method} /api/{rest}")


_patterns, _app_name, _namespace = api.urls
urlpatterns = ([*_open(_patterns), re_path(r"(?P<rest>(?s:.+))", nothing)], _app_name, _namespace)
