"""Converts journal values to model columns and validates their type and range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from django.core.exceptions import ValidationError
from django.db import models

from diloco.protocol.parsing import abridged
from runs.exceptions import ActionRefused
from runs.ingest.journal_tables import STORED_AS
from runs.models import Run
from runs.times import is_wall_time

_JSON: Mapping[str, tuple[type, ...]] = {
    "tags": (list,),
    "options": (dict,),
    "handle": (dict,),
    "notify": (list,),
}
"""Types of JSON columns that are not None."""
REASON_LIMIT = 500
"""Characters of a reason that names a wrong column."""


def columns(model: type[models.Model], body: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The values of ``body`` for these columns. :class:`ActionRefused` names a wrong column."""
    keys = {name: STORED_AS.get(name, name) for name in names}
    return {name: _value(model, name, body[key]) for name, key in keys.items() if key in body}


def moment(value: Any) -> datetime | None:
    values = columns(Run, {"created_at": value}, ("created_at",)) if value else {}
    at: datetime | None = values.get("created_at")
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
        reason = "; ".join(error.messages)
        if len(reason) > REASON_LIMIT:  # it quotes the value
            reason = f"expected {type(column).__name__}, found {abridged(given)}"
    except (TypeError, ValueError, OverflowError):
        reason = f"expected {type(column).__name__}, found {abridged(given)}"
    else:
        return value
    raise ActionRefused(f"journal: {model.__name__} {name}: {reason}")


def _check_type(column: models.Field[Any, Any], given: Any) -> None:
    if given is None:
        return
    if isinstance(column, models.JSONField):
        expected_types = _JSON.get(column.name, (dict, list))
        are_texts = column.name != "tags" or all(isinstance(tag, str) for tag in given)
        if not isinstance(given, expected_types) or not are_texts:
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
    """Check the fields of a :class:`~executors.base.ReplicaHandle`."""
    texts = isinstance(given.get("backend"), str) and isinstance(given.get("launch_key"), str)
    data = given.get("data", {})
    if not texts or not isinstance(data, dict) or set(given) - {"backend", "launch_key", "data"}:
        raise TypeError


def _aware(at: datetime) -> datetime:
    """Convert to UTC. Times at the limits of the calendar cannot be converted."""
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    at = at.astimezone(UTC)
    if not is_wall_time(at.timestamp()):
        raise ValidationError(f"expected a time between 1970 and 2100, found {at.isoformat()}")
    return at
