"""Convert values for JSON: times as ISO 8601 in UTC, numbers that are not finite as null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from functools import cache
from typing import Any


def iso(at: datetime | None) -> str | None:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """The object in a JSON column, or {} if the column holds something else."""
    return value if isinstance(value, Mapping) else {}


def texts(value: Any) -> list[str]:
    """The strings of the list in a JSON column, or [] if the column holds something else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def row_of(kind: Any, source: object, /, **own: Any) -> dict[str, Any]:
    """A row of the API type ``kind`` (:mod:`archipelago.rows`), as a JSON object.

    A field is one of ``own``, or else the attribute of ``source`` with its name.
    """
    return {
        name: own[name] if name in own else json_value(getattr(source, name))
        for name in _names(kind)
    }


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def json_value(value: Any) -> Any:
    """The value of a column as a JSON value; a number that is not finite is null."""
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, float):
        return finite(value)
    return str(value) if isinstance(value, str) else value  # an enum is a str, too
