"""Comparisons of stored times with the wall clock that hold when the clock is set back.

Stored times outlive processes, so they are times of the wall clock. After it was set back by an
hour, a time that was stored just before lies an hour ahead: a plain comparison then waits for that
hour. No time is stored that lies further ahead than some limit, so one that does was stored before
the clock was set back, and is over.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import Q


def has_passed(since: datetime, limit: timedelta, now: datetime) -> bool:
    """Whether more than ``limit`` has passed since then, or ``since`` lies further ahead."""
    return now - since > limit or since - now > limit


def is_due(at: datetime | None, longest: timedelta, now: datetime) -> bool:
    """Whether that time has come; None has. ``longest`` is how far ahead it can be stored."""
    return at is None or at <= now or at - now > longest


def due(field: str, longest: timedelta, now: datetime) -> Q:
    """:func:`is_due` of a column, for a query."""
    return (
        Q(**{f"{field}__isnull": True})
        | Q(**{f"{field}__lte": now})
        | Q(**{f"{field}__gt": now + longest})
    )
