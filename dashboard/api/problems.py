"""Error responses: always JSON.

``{"detail": "...", "errors": [{"field", "message", "expected", "found"}]}``. ``errors`` lists the
invalid fields of a request (status 422).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import HttpError, ValidationError
from pydantic import BaseModel, Field

from dashboard.api.document_text import Unfit
from diloco.protocol.settings import SettingsError
from runs.exceptions import ActionRefused, IllegalTransition, InvalidRun
from runs.queries.search import BadQuery

_EXPECTED_FOUND = re.compile(r"expected (?P<expected>.*), found (?P<found>.*)", re.DOTALL)
SHOWN = 80


class FieldProblem(BaseModel):
    """One invalid field. ``expected`` and ``found`` are parts of ``message``, if it has them."""

    field: str
    message: str
    expected: str | None = None
    found: str | None = None


class Problem(BaseModel):
    detail: str
    errors: list[FieldProblem] = Field(default_factory=list)


class Invalid(Exception):
    """The request is invalid; ``problems`` has one entry per invalid field."""

    def __init__(self, problems: Iterable[FieldProblem]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(f"{p.field}: {p.message}" for p in self.problems))


def at(field: str, message: str) -> FieldProblem:
    match = _EXPECTED_FOUND.fullmatch(message)
    return FieldProblem(
        field=field,
        message=message,
        expected=match["expected"] if match else None,
        found=match["found"] if match else None,
    )


def answer(request: HttpRequest, status: int, detail: str, **more: Any) -> HttpResponse:
    body = Problem(detail=detail, **more)
    return HttpResponse(
        body.model_dump_json(), status=status, content_type="application/json; charset=utf-8"
    )


def install(api: NinjaAPI) -> None:
    """Register a handler for every exception that an operation raises on purpose."""

    @api.exception_handler(Http404)
    def _missing(request: HttpRequest, error: Any) -> HttpResponse:
        return answer(request, 404, "not found, or not visible to you")

    @api.exception_handler(HttpError)
    def _http(request: HttpRequest, error: Any) -> HttpResponse:
        if isinstance(error.__cause__, Unfit):
            return _invalid(request, [at("", str(error.__cause__))])
        if isinstance(error.__cause__, RequestDataTooBig):
            return answer(request, 413, str(error.__cause__))
        why = f": {error.__cause__}" if error.__cause__ else ""
        response = answer(request, error.status_code, f"{error}{why}")
        if error.status_code == 401:
            response["WWW-Authenticate"] = 'Bearer realm="archipelago"'
        return response

    @api.exception_handler(RequestDataTooBig)
    def _too_large(request: HttpRequest, error: Any) -> HttpResponse:
        return answer(request, 413, str(error))

    @api.exception_handler(ValidationError)
    def _unfit(request: HttpRequest, error: Any) -> HttpResponse:
        return _invalid(request, [of_pydantic(e) for e in error.errors])

    @api.exception_handler(Invalid)
    def _wrong(request: HttpRequest, error: Any) -> HttpResponse:
        return _invalid(request, error.problems)

    @api.exception_handler(InvalidRun)
    def _no_run(request: HttpRequest, error: Any) -> HttpResponse:
        return _invalid(request, [at(each.field, each.message) for each in error.problems])

    @api.exception_handler(SettingsError)
    def _no_setting(request: HttpRequest, error: Any) -> HttpResponse:
        return _invalid(request, [at(error.field, error.message)])

    @api.exception_handler(BadQuery)
    def _no_query(request: HttpRequest, error: Any) -> HttpResponse:
        return _invalid(request, [at("q", str(error))])

    @api.exception_handler(ActionRefused)
    @api.exception_handler(IllegalTransition)
    def _too_late(request: HttpRequest, error: Any) -> HttpResponse:
        return answer(request, 409, str(error))


def _invalid(request: HttpRequest, problems: list[FieldProblem]) -> HttpResponse:
    detail = "; ".join(f"{p.field}: {p.message}" if p.field else p.message for p in problems)
    return answer(request, 422, detail, errors=problems)


_EXPECTED = {
    "missing": "a value",
    "extra_forbidden": "no such field",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "less than {lt}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_pattern_mismatch": "text of the form {pattern}",
}
_EXPECTED_TYPE = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "uuid": "a UUID",
    "date": "a day such as 2026-01-31",
    "datetime": "a time in ISO 8601",
}


def of_pydantic(error: Mapping[str, Any]) -> FieldProblem:
    """Convert a Pydantic error (https://docs.pydantic.dev/latest/errors/validation_errors/)."""
    kind, where = str(error["type"]), list(error["loc"])
    # Ninja prefixes the field with its source, and in a body with the name of the parameter.
    field = ".".join(str(part) for part in (where[2:] if where[0] == "body" else where[1:]))
    if kind in _EXPECTED:
        bounds = error.get("ctx", {}).items()
        expected = _EXPECTED[kind].format_map(
            {name: f"{v:g}" if isinstance(v, float) else v for name, v in bounds}
        )
    else:
        expected = _EXPECTED_TYPE.get(kind.partition("_")[0], str(error["msg"]))
    value_text = "none" if kind == "missing" else _short(error.get("input"))
    return at(field, f"expected {expected}, found {value_text}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
