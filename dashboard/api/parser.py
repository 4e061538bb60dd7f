"""Parse request bodies: JSON, or TOML for runs written by hand.

Values that a database column, a hash or a comparison cannot handle are rejected here, for all
operations: numbers that are not finite or not exact in JSON, text that is not valid Unicode, NUL,
dates, and deep nesting.

Parsing takes time linear in the size of the body. Python's TOML parser takes quadratic time for
dotted keys (20 KB: 20 s), so the number of their parts is checked first, and TOML bodies are small.
Operations that change runs check the caller's role before the body is parsed
(:data:`dashboard.api.auth.OPERATORS`).
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from typing import Any, cast

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest
from ninja.parser import Parser
from ninja.types import DictStrAny

TOML = "application/toml"
DEEPEST = 20
LARGEST = 2**53
JSON_BYTES = 1_000_000
TOML_BYTES = 64_000

_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\(?:.|\Z))*?(?:"{3,5}|\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]|\\(?:.|\Z))*(?:"|$|\Z)'
    r"|'[^'\n]*(?:'|$|\Z)"
    r"|#[^\n]*",
    re.DOTALL | re.MULTILINE,
)
"""Every alternative also ends at the end of the text, so that one scan takes linear time."""
_SPACE_AT_DOT = re.compile(r"(?<![ \t])[ \t]*\.[ \t]*")
_MANY_PARTS = re.compile(rf"(?<![\w-])(?:[\w-]*\.){{{DEEPEST}}}")


class BodyParser(Parser):
    """Parse JSON or TOML. A malformed body is a 400, an unsupported value (:class:`Unfit`) a 422. A
    body of ``null`` counts as no body."""

    def parse_body(self, request: HttpRequest) -> DictStrAny:
        is_toml = request.content_type == TOML
        limit = TOML_BYTES if is_toml else JSON_BYTES
        if len(request.body) > limit:
            raise RequestDataTooBig(
                f"expected at most {limit:,} bytes, found {len(request.body):,}"
            )
        text = request.body.decode()
        try:
            if is_toml:
                check_toml_keys(text)
                body: Any = tomllib.loads(text)
            else:
                body = json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("expected a document, found one nested too deeply") from None
        check_value(body)
        if body is not None and not isinstance(body, dict):
            raise ValueError(f"expected an object, found {type(body).__name__}")
        return cast(DictStrAny, body)


class Unfit(ValueError):
    """A value that JSON or TOML can express and the API does not accept."""


def check_toml_keys(text: str) -> None:
    """Raise :class:`Unfit` for a dotted key of more than :data:`DEEPEST` parts."""
    keys = _SPACE_AT_DOT.sub(".", _STRING_OR_COMMENT.sub("_", text))
    if _MANY_PARTS.search(keys):
        raise Unfit(f"expected keys of at most {DEEPEST} parts, found more")


def check_value(value: Any, *, depth: int = 0) -> None:
    """Raise :class:`Unfit` for a value that the API does not accept."""
    if depth > DEEPEST:
        raise Unfit(f"expected at most {DEEPEST} levels, found more")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_text(key)
            check_value(item, depth=depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_value(item, depth=depth + 1)
    elif isinstance(value, str):
        _check_text(value)
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int):
        if abs(value) > LARGEST:
            raise Unfit(f"expected whole numbers up to 2^53, found {str(value)[:24]}…")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Unfit(f"expected finite numbers, found {value}")
    else:
        raise Unfit(f"expected no date or time, found {value}")


def _check_text(text: str) -> None:
    if "\x00" in text:
        raise Unfit("expected text without NUL, found one")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unfit("expected Unicode text, found half of a surrogate pair") from None


def _refuse_constant(name: str) -> Any:
    raise Unfit(f"expected finite numbers, found {name}")
