"""Bodies: JSON, and TOML for people who write a run into a file.

What a database, a hash or a comparison could stumble over is refused here, once for every call:
numbers that are not finite or too large to be exact in JSON, text that is not Unicode, NUL, dates,
and nesting without end.
"""

from __future__ import annotations

import json
import math
import tomllib
from typing import Any, cast

from django.http import HttpRequest
from ninja.parser import Parser
from ninja.types import DictStrAny

TOML = "application/toml"
DEEPEST = 20
LARGEST = 2**53


class BodyParser(Parser):
    """A body that cannot be read is a 400, one that holds what nobody takes (:class:`Unfit`) a 422.
    ``null`` is no body."""

    def parse_body(self, request: HttpRequest) -> DictStrAny:
        text = request.body.decode()
        try:
            if request.content_type == TOML:
                body: Any = tomllib.loads(text)
            else:
                body = json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("expected a document, found one that is nested too deeply") from None
        check_value(body)
        if body is not None and not isinstance(body, dict):
            raise ValueError(f"expected an object, found {type(body).__name__}")
        return cast(DictStrAny, body)


class Unfit(ValueError):
    """JSON and TOML can say it, and we do not take it."""


def check_value(value: Any, *, depth: int = 0) -> None:
    """:class:`Unfit` for what JSON, TOML or Python take and we do not."""
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
