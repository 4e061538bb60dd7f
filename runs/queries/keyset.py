"""Pages of rows by time, newest first.

A page begins after the key of the last row of the one before, so that no row is missed or repeated
while rows are added, and each page costs the same.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from django.db.models import Model, Q, QuerySet, UUIDField

M = TypeVar("M", bound=Model)

UUID_PLACE = r"^[0-9]{1,17}_[0-9a-f]{32}$"
ID_PLACE = r"^[0-9]{1,17}_[0-9]{1,18}$"
"""Position of a page: microseconds since 1970, and a primary key."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def page(rows: QuerySet[M], time: str, *, before: str, limit: int) -> tuple[list[M], str]:
    """One page in the order of the column ``time``, and the position of the next ('' on the last).

    A ``before`` that is no position selects the first page.
    """
    has_uuid = isinstance(rows.model._meta.pk, UUIDField)
    if re.fullmatch(UUID_PLACE if has_uuid else ID_PLACE, before):
        microseconds, pk = before.split("_")
        at = _EPOCH + int(microseconds) * _MICROSECOND
        rows = rows.filter(Q(**{f"{time}__lt": at}) | Q(**{time: at, "pk__lt": pk}))
    found = list(rows.order_by(f"-{time}", "-pk")[: limit + 1])
    if len(found) <= limit:
        return found, ""
    last = found[limit - 1]
    pk = last.pk.hex if has_uuid else last.pk
    return found[:limit], f"{(getattr(last, time) - _EPOCH) // _MICROSECOND}_{pk}"
