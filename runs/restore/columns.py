"""Columns of a row out of a journal's body: of the column's type, in its range, or named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from django.core.exceptions import ValidationError
from django.db import models

from diloco.protocol.parsing import abridged
from runs.exceptions import CannotDo
from runs.ingest.limits import is_wall_time
from runs.models import Run

_JSON: Mapping[str, tuple[type, ...]] = {
    "tags": (list,),
    "options": (dict,),
    "handle": (dict,),
    "notify": (list,),
}
"""What a column of JSON holds, where it is not None."""


def columns(model: type[models.Model], body: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The values of ``body`` for these columns. Raises :class:`CannotDo` with the column's name."""
    return {name: _value(model, name, body[name]) for name in names if name in body}


def moment(value: Any) -> datetime | None:
    found = columns(Run, {"created_at": value}, ("created_at",)) if value else {}
    at: datetime | None = found.get("created_at")
    return at


def _value(model: type[models.Model], name: str, given: Any) -> Any:
    column = model._meta.get_field(name)
    assert isinstance(column, models.Field)
    try:
        _check_type(column, given)
        value = column.to_python(given)
        if isinstance(value, datetime):
            value = _aware(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValidationError("expected a finite number, found one that is not")
        if value not in column.empty_values:
            value = column.clean(value, None)
        if value is None and not column.null:
            raise ValidationError("expected a value, found none")
    except ValidationError as error:
        why = "; ".join(error.messages)
    except (TypeError, ValueError, OverflowError):
        why = f"expected {type(column).__name__}, found {abridged(given)}"
    else:
        return value
    raise CannotDo(f"journal: {model.__name__} {name}: {why}")


def _check_type(column: models.Field[Any, Any], given: Any) -> None:
    if given is None:
        return
    if isinstance(column, models.JSONField):
        wanted = _JSON.get(column.name, (dict, list))
        texts = column.name != "tags" or all(isinstance(tag, str) for tag in given)
        if not isinstance(given, wanted) or not texts:
            raise TypeError
        if column.name == "handle":
            _check_handle(cast(dict[str, Any], given))
    elif isinstance(column, models.BooleanField):
        if not isinstance(given, bool):
            raise TypeError
    elif isinstance(column, models.IntegerField | models.FloatField):
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise TypeError
    elif not isinstance(given, str):
        raise TypeError


def _check_handle(given: Mapping[str, Any]) -> None:
    """What :class:`~executors.base.ReplicaHandle` is made of."""
    texts = isinstance(given.get("backend"), str) and isinstance(given.get("launch_key"), str)
    data = given.get("data", {})
    if not texts or not isinstance(data, dict) or set(given) - {"backend", "launch_key", "data"}:
        raise TypeError


def _aware(at: datetime) -> datetime:
    """In UTC, which a time at the ends of the calendar cannot be turned into."""
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    at = at.astimezone(UTC)
    if not is_wall_time(at.timestamp()):
        raise ValidationError(f"expected a time between 1970 and 2100, found {at.isoformat()}")
    return at
