"""How the cost of an attempt is spread over the days of a period.

The database stores one cost per attempt (:mod:`runs.reconcile.billing`). It is spread evenly over
the time in which it arose: from the start of the job to its end, or as far as it was billed. The
cost before a queue suspended a job is spread over the time before its last start. Days are in UTC.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.db.models import CharField, F, Value
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce

from runs.json_values import finite
from runs.queries.spend_history import Stretch

LONGEST_DAYS = 366
EARLIEST = date(2000, 1, 1)
DAY = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Period:
    """The days from ``first`` to ``last``, both included."""

    first: date
    last: date

    @classmethod
    def until(cls, last: date, *, first: date | None = None, days: int = 7) -> Period:
        """From ``first``, otherwise ``days`` days. Raises ``OverflowError`` for the year 1."""
        return cls(first=first or last - (days - 1) * DAY, last=last)

    def problem(self, *, today: date) -> str:
        """Why the period cannot be shown; '' if it can."""
        if self.last < self.first:
            return f"expected a first day up to {self.last}, found {self.first}"
        if self.first < EARLIEST or self.last > today:
            return f"expected days from {EARLIEST} to {today}, found {self.first} to {self.last}"
        number = (self.last - self.first).days + 1
        if number > LONGEST_DAYS:
            return f"expected at most {LONGEST_DAYS} days, found {number}"
        return ""

    def __contains__(self, day: date) -> bool:
        return self.first <= day <= self.last

    @property
    def days(self) -> list[date]:
        return [self.first + n * DAY for n in range((self.last - self.first).days + 1)]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The columns that a cost depends on."""

    run: uuid.UUID
    backend: str
    price: float | None
    cost: float | None
    earlier: float
    created_at: datetime
    launched_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


COLUMNS: tuple[str, ...] = (
    "replica__run_id",
    "replica__pool__backend",
    "price_usd_h",
    "cost_usd",
    "earlier_cost_usd",
    "created_at",
    "launched_at",
    "started_at",
    "ended_at",
)


BACKEND_OF_EVALUATION = Coalesce(
    KT("handle__backend"), F("evaluation__plan__backend"), output_field=CharField()
)
"""The backend of an attempt's job. That of its plan can have changed since."""
EVALUATION_COLUMNS: tuple[Any, ...] = (
    "evaluation__run_id",
    BACKEND_OF_EVALUATION,
    *COLUMNS[2:4],
    Value(0.0),
    *COLUMNS[5:],
)
"""The same of an attempt of an evaluation."""


def stretches(attempt: Attempt, now: datetime) -> list[Stretch]:
    """The times in which an attempt ran, with their costs; empty if it cost nothing so far."""
    begun = attempt.started_at or attempt.launched_at or attempt.created_at
    end = attempt.ended_at or now
    if attempt.price is None or not math.isfinite(attempt.price):
        if attempt.started_at is None:
            return []
        return [Stretch(start=begun, end=max(begun, end), usd=None)]
    cost = finite(attempt.cost) or 0.0
    earlier = min(max(finite(attempt.earlier) or 0.0, 0.0), cost)
    result = []
    if earlier > 0:
        first = min(attempt.launched_at or attempt.created_at, begun)
        until = begun if attempt.started_at else end
        result.append(Stretch(start=first, end=max(first, until), usd=earlier))
    if cost > earlier or attempt.started_at:
        if attempt.ended_at is None and attempt.price > 0:
            # As far as its cost is stored, which is a little behind.
            hours = min((cost - earlier) / attempt.price, 1e6)
            end = min(end, begun + timedelta(hours=hours))
        result.append(Stretch(start=begun, end=max(begun, end), usd=cost - earlier))
    return result


def by_day(stretch: Stretch, period: Period) -> Iterator[tuple[date, float, float]]:
    """The days of the period with the share and the seconds of a stretch on each."""
    start, end = stretch.start, stretch.end
    length_s = (end - start).total_seconds()
    day = max(start.date(), period.first)
    last = min(end.date(), period.last)
    while day <= last:
        start_of_day = midnight(day)
        s = (min(end, start_of_day + DAY) - max(start, start_of_day)).total_seconds()
        if length_s <= 0:
            yield day, 1.0, 0.0
        elif s > 0:
            yield day, s / length_s, s
        day += DAY


def midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
