"""The costs of many attempts at once, with NumPy: those that cost evenly from start to end.

These are all attempts but those that a queue suspended.
:func:`runs.queries.attempt_costs.stretches` has the rule for every attempt; a test compares both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime
from functools import cached_property
from typing import Any, Self

import numpy as np
from django.db.models import F, FloatField, Func, Q
from django.db.models.functions import Coalesce
from numpy.typing import NDArray

from runs.queries.attempt_costs import midnight
from runs.queries.spend_rows import Tally

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LARGEST_USD = sys.float_info.max
HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
MOST_HOURS = 1e6


class _Microseconds(Func):
    """A time in microseconds since 1970. Converting a page of datetimes takes longer than all else
    that is done with it."""

    template = "CAST(EXTRACT(EPOCH FROM %(expressions)s) * 1000000 AS double precision)"

    def __init__(self, time: Any) -> None:
        super().__init__(time, output_field=FloatField())

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        # Functions of SQLite round to milliseconds. Seconds end at the 19th character, and
        # fractions begin at the 21st.
        template = (
            "(strftime('%%%%s', substr(%(expressions)s, 1, 19)) * 1000000"
            " + CAST(substr(%(expressions)s, 21) AS INTEGER))"
        )
        return self.as_sql(compiler, connection, template=template, **context)


COLUMNS: tuple[Any, ...] = (
    "pk",
    "replica__pool_id",
    "price_usd_h",
    "cost_usd",
    "earlier_cost_usd",
    _Microseconds(Coalesce("started_at", "launched_at", "created_at")),
    _Microseconds(F("ended_at")),
)
COSTLY = Q(started_at__isnull=False) | Q(
    price_usd_h__gte=-LARGEST_USD,
    price_usd_h__lte=LARGEST_USD,
    cost_usd__gt=0,
    cost_usd__lte=LARGEST_USD,
)
"""The attempts that cost something, or have an unknown cost. Bounds exclude infinities, and NaN,
which PostgreSQL orders above every number."""


@dataclass(frozen=True, kw_only=True)
class EvenCosts:
    """Columns of attempts. Each cost ``usd`` evenly from ``start_us`` to ``end_us``.

    Attributes:
        attempt: ids.
        pool: ids of the replicas' pools.
        usd: NaN if the price is unknown.
        start_us: microseconds since 1970, as ``end_us``.
        is_even: false for attempts that a queue suspended, whose columns are wrong.
    """

    attempt: Integers
    pool: Integers
    usd: Floats
    start_us: Integers
    end_us: Integers
    is_even: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Any]], now: datetime) -> Self:
        """From rows of :data:`COLUMNS` that match :data:`COSTLY`."""
        table = np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS))
        attempt, pool, price, cost, earlier, start, end = table.T
        price = np.where(np.isfinite(price), price, np.nan)
        cost = np.maximum(np.where(np.isfinite(cost), cost, 0.0), 0.0)
        # An open attempt cost as far as its cost is stored, which is a little behind.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            paid_us = np.minimum(cost / price, MOST_HOURS) * HOUR_US
        paid_until = np.where(price > 0, start + paid_us, np.inf)
        end = np.where(np.isnan(end), np.minimum(round(now.timestamp() * 1e6), paid_until), end)
        return cls(
            attempt=attempt.astype(np.int64),
            pool=pool.astype(np.int64),
            usd=np.where(np.isnan(price), np.nan, cost),
            start_us=np.rint(start).astype(np.int64),
            end_us=np.rint(np.maximum(start, end)).astype(np.int64),
            is_even=~((cost > 0) & (earlier > 0) & np.isfinite(earlier + price)),
        )

    def __len__(self) -> int:
        return len(self.attempt)

    def only(self, chosen: Any) -> Self:
        """The chosen attempts: a mask."""
        return type(self)(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    @cached_property
    def _days(self) -> tuple[Integers, Integers]:
        """The first and the last day of each attempt since 1970; one that ends at midnight does not
        reach the next day."""
        first = self.start_us // DAY_US
        return first, np.maximum(first, (self.end_us - 1) // DAY_US)

    def on(self, day: date) -> tuple[Integers, Floats, Floats]:
        """Of the attempts that ran on a day: their places in the columns, and what they cost on
        that day with the seconds."""
        first, last = self._days
        start = round(midnight(day).timestamp() * 1e6)
        number = start // DAY_US
        here = np.flatnonzero((first <= number) & (last >= number))
        begun, ended = self.start_us[here], self.end_us[here]
        us = np.minimum(ended, start + DAY_US) - np.maximum(begun, start)
        length = ended - begun
        share = np.divide(us, length, out=np.ones(len(here)), where=length > 0)
        return here, self.usd[here] * share, us / 1e6


class Parts:
    """Costs of attempts, summed up over some days."""

    def __init__(self, number: int) -> None:
        self._usd, self._s = np.zeros(number), np.zeros(number)
        self._ran = np.zeros(number, dtype=bool)

    def add(self, places: Integers, usd: Floats, s: Floats) -> None:
        """Add a day, with the values of :meth:`EvenCosts.on`."""
        with np.errstate(over="ignore"):  # the sum of several is shown as unknown
            self._usd[places] += usd
        self._s[places] += s
        self._ran[places] = True

    def tallies(self, groups: Integers, number: int) -> list[Tally]:
        """Sums of the attempts that ran on the days, by group."""
        ran = self._ran
        return tallies(groups[ran], number, self._usd[ran], self._s[ran])


def tallies(groups: Integers, number: int, usd: Floats, s: Floats) -> list[Tally]:
    """Sums of jobs by group: ``groups`` has the group of each, from 0 to ``number`` - 1."""
    unknown = np.isnan(usd)
    columns = (
        np.bincount(groups, np.where(unknown, 0.0, usd), number),
        np.bincount(groups, np.where(unknown, s, 0.0), number),
        np.bincount(groups, minlength=number),
        np.bincount(groups[unknown], minlength=number),
    )
    return [Tally(*values) for values in zip(*(c.tolist() for c in columns), strict=True)]
