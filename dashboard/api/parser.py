"""Bodies: JSON, and TOML for people who write a run into a file.

What a database, a hash or a comparison could stumble over is refused here, once for every call:
numbers that are not finite or too large to be exact in JSON, text that is not Unicode, NUL, dates,
and nesting without end.
"""

from __future__ import annotations

import json
import math
import tomllib
from typing import Any

from django.http import HttpRequest
from ninja.parser import Parser
from ninja.types import DictStrAny

TOML = "application/toml"
DEEPEST = 20
LARGEST = 2**53


class BodyParser(Parser):
    """Errors raised here become a 400 with their words."""

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
        if not isinstance(body, dict):
            raise ValueError(f"expected an object, found {type(body).__name__}")
        return body


def check_value(value: Any, *, depth: int = 0) -> None:
    """``ValueError`` for what JSON, TOML or Python take and we do not."""
    if depth > DEEPEST:
        raise ValueError(f"expected at most {DEEPEST} levels, found more")
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
            raise ValueError(f"expected whole numbers up to 2^53, found {str(value)[:24]}…")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"expected finite numbers, found {value}")
    else:
        raise ValueError(f"expected no date or time, found {value}")


def _check_text(text: str) -> None:
    if "\x00" in text:
        raise ValueError("expected text without NUL, found one")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("expected Unicode text, found half of a surrogate pair") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected finite numbers, found {name}")
