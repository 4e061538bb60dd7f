"""Parse request bodies: JSON, or TOML or YAML for runs written by hand.

Parsing takes time linear in the size of the body (:mod:`dashboard.api.document_text`). Operations
that change runs check the caller's role before the body is parsed
(:data:`dashboard.api.auth.OPERATORS`).
"""

from __future__ import annotations

from typing import cast

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest
from ninja.parser import Parser
from ninja.types import DictStrAny

from dashboard.api.document_text import Format, limit_of, parse

TOML = "application/toml"
YAML = "application/yaml"
FORMATS: dict[str, Format] = {TOML: "toml", YAML: "yaml"}


class BodyParser(Parser):
    """Parse JSON, TOML or YAML. A malformed body is a 400, an unsupported value
    (:class:`~dashboard.api.document_text.Unfit`) a 422. A body of ``null`` counts as no body."""

    def parse_body(self, request: HttpRequest) -> DictStrAny:
        format = FORMATS.get(request.content_type or "", "json")
        limit = limit_of(format)
        if len(request.body) > limit:
            raise RequestDataTooBig(
                f"expected at most {limit:,} bytes, found {len(request.body):,}"
            )
        body = parse(request.body.decode(), format)
        if body is not None and not isinstance(body, dict):
            raise ValueError(f"expected an object, found {type(body).__name__}")
        return cast(DictStrAny, body)
