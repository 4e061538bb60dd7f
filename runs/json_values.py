"""Convert values for JSON: times as ISO 8601 in UTC, numbers that are not finite as null."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from functools import cache
from operator import attrgetter
from typing import Any


def iso(at: datetime | None) -> str | None:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def least(*values: float | None) -> float | None:
    """The smallest number that is known and finite; None without one."""
    return min((v for v in values if v is not None and math.isfinite(v)), default=None)


def mapping(value: Any) -> Mapping[str, Any]:
    """The object in a JSON column, or {} if the column holds something else."""
    return value if type(value) is dict or isinstance(value, Mapping) else {}


def texts(value: Any) -> list[str]:
    """The strings of the list in a JSON column, or [] if the column holds something else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def row_of(kind: Any, source: object, /, **own: Any) -> dict[str, Any]:
    """A row of the API type ``kind`` (:mod:`archipelago.rows`), as a JSON object.

    A field is one of ``own``, or else the attribute of ``source`` with its name.
    """
    names, read, get = _fields(kind, tuple(own))
    own.update(zip(read, map(json_value, get(source)), strict=True))
    return {name: own[name] for name in names}


@cache
def _fields(
    kind: Any, own: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], Callable[[object], Iterable[Any]]]:
    """All fields of a row type, those that are not ``own``, and a function that reads these."""
    names = tuple(field.name for field in fields(kind))
    read = tuple(name for name in names if name not in own)
    get = attrgetter(*read) if len(read) > 1 else lambda row: [getattr(row, n) for n in read]
    return names, read, get


_AS_IS = frozenset({str, int, bool, type(None)})


def json_value(value: Any) -> Any:
    """The value of a column as a JSON value; a number that is not finite is null."""
    if type(value) in _AS_IS:
        return value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, datetime):
        return iso(value)
    return str(value) if isinstance(value, str) else value  # an enum is a str, too
