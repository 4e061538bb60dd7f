"""Times from outside, and stored times compared with the wall clock, also after it was set back.

Stored times outlive processes, so they are wall-clock times. If the clock is set back by an hour, a
time stored just before is an hour in the future, and a plain comparison would wait for that hour.
No code stores a time further ahead than a known limit. A time beyond that limit was therefore
stored before the clock was set back, and counts as passed.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.db.models import Q

LATEST_WALL_S = 4_102_444_800.0
"""2100-01-01 in seconds since 1970. Times before 1970 or after this are invalid."""


def is_wall_time(value: float) -> bool:
    """Whether a column can hold this time in seconds since 1970; False for NaN."""
    return 0 <= value <= LATEST_WALL_S


def from_wall(value: float | None) -> datetime | None:
    """The time that a backend or a replica reports; None for one that no job can have."""
    if value is None or not is_wall_time(value):
        return None
    return datetime.fromtimestamp(value, tz=UTC)


def in_utc(at: datetime) -> datetime:
    """A time with any zone in UTC; the first or last time there is if it lies beyond.

    For times from outside: near the years 1 and 9999 a database cannot convert them.
    """
    try:
        return at.astimezone(UTC)
    except OverflowError:
        return (datetime.min if at.year == 1 else datetime.max).replace(tzinfo=UTC)


def has_passed(since: datetime, limit: timedelta, now: datetime) -> bool:
    """Whether more than ``limit`` has passed since ``since``, or it is further ahead than that."""
    return now - since > limit or since - now > limit


def is_due(at: datetime | None, longest: timedelta, now: datetime) -> bool:
    """Whether the time ``at`` has come; None always has.

    ``longest`` is how far ahead such a time can be stored.
    """
    return at is None or at <= now or at - now > longest


def due(field: str, longest: timedelta, now: datetime) -> Q:
    """:func:`is_due` as a condition on a column."""
    return (
        Q(**{f"{field}__isnull": True})
        | Q(**{f"{field}__lte": now})
        | Q(**{f"{field}__gt": now + longest})
    )
