"""The runs list: pages in any order, facets, and sparklines.

Pagination is by key (the sorted value and the ID), so that each page costs the same and no run is
missed or repeated. Unknown values sort last in both directions. Each function makes a constant
number of queries; :func:`facets` at most one more per facet in the query.
"""

from __future__ import annotations

import datetime
import math
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, F, Q, QuerySet, prefetch_related_objects
from django.utils.dateparse import parse_datetime

from runs.json_values import texts
from runs.metrics.blocks import LEVELS, Points, concatenate
from runs.models import MetricBlock, ReplicaPool, Run
from runs.queries.lookups import AmongIds
from runs.queries.search import Term, matching
from runs.states import RunState
from runs.times import in_utc

SORTS = {
    "created": "created_at",
    "name": "name",
    "rounds": "committed_rounds",
    "loss": "eval_loss",
    "train": "train_loss",
    "tokens": "tokens",
    "cost": "cost_usd",
    "started": "started_at",
}
"""Name in the URL -> column."""
RISING = ("name", "loss", "train")
"""Orders that are ascending by default; the indexes of :class:`Run` have these directions."""
NEWEST = "-created"
SPARK_POINTS = 40
COUNTED = 2000
"""Number of newest runs that facets count, so that they cost the same with a million runs."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Sort order of the list."""

    name: str = "created"
    falling: bool = True

    @classmethod
    def of(cls, text: str) -> Order:
        """Parse an order such as ``-loss`` (descending); unknown text means newest first."""
        name = text.removeprefix("-")
        return cls(name=name, falling=text.startswith("-")) if name in SORTS else cls()

    def __str__(self) -> str:
        return f"{'-' if self.falling else ''}{self.name}"

    @property
    def column(self) -> str:
        return SORTS[self.name]

    @property
    def turned(self) -> bool:
        """Whether the direction is reversed.

        The order of runs with equal values is then reversed as well, so that a backward scan of the
        index serves.
        """
        return self.falling == (self.name in RISING)

    @property
    def nullable(self) -> bool:
        """Whether the column can be null."""
        return bool(Run._meta.get_field(self.column).null)


def page(
    runs: QuerySet[Run], order: Order, *, after: str = "", limit: int = 50
) -> tuple[list[Run], str]:
    """One page of runs, and the position of the next page ('' on the last).

    An ``after`` that is no position of this order selects the first page.
    """
    place = _place(order, after)
    if place is not None:
        runs = runs.filter(_beyond(order, *place))
    # PostgreSQL uses its index only without NULLS LAST if the column has no nulls.
    unknown_last = True if order.nullable else None
    column = F(order.column)
    by = (
        column.desc(nulls_last=unknown_last)
        if order.falling
        else column.asc(nulls_last=unknown_last)
    )
    rows = list(runs.order_by(by, "id" if order.turned else "-id")[: limit + 1])
    shown = rows[:limit]
    return shown, _format_place(order, shown[-1]) if len(rows) > limit else ""


def is_place(order: Order, text: str) -> bool:
    """Whether ``text`` is a position of this order."""
    return _place(order, text) is not None


def _beyond(order: Order, value: Any, pk: uuid.UUID) -> Q:
    column, rest = order.column, "pk__gt" if order.turned else "pk__lt"
    if value is None:
        return Q(**{f"{column}__isnull": True, rest: pk})
    way = "lt" if order.falling else "gt"
    later = Q(**{f"{column}__{way}": value}) | Q(**{column: value, rest: pk})
    if order.nullable:
        return later | Q(**{f"{column}__isnull": True})
    # The redundant condition without OR lets the database start the index scan there.
    return Q(**{f"{column}__{way}e": value}) & later


def _format_place(order: Order, run: Run) -> str:
    value = getattr(run, order.column)
    if isinstance(value, datetime.datetime):
        value = value.isoformat()
    return f"{'' if value is None else value}_{run.pk}"


def _place(order: Order, text: str) -> tuple[Any, uuid.UUID] | None:
    """Parse a position from :func:`_format_place`; None for other text."""
    value, _, pk = text.rpartition("_")
    try:
        return _parse_value(order, value), uuid.UUID(pk)
    except ValueError:
        return None


def _parse_value(order: Order, text: str) -> Any:
    if "\x00" in text:
        raise ValueError(text)
    if order.name == "name":
        return text
    if not text and order.name != "created":
        return None
    if order.name in ("created", "started"):
        moment = parse_datetime(text)
        if moment is None or moment.tzinfo is None:
            raise ValueError(text)
        return in_utc(moment)
    number = int(text) if order.name in ("rounds", "tokens") else float(text)
    if not math.isfinite(number) or abs(number) >= 2**63:
        raise ValueError(text)
    return number


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A value of a facet, and the number of its runs."""

    value: str
    count: int
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class Facets:
    """Choices of each facet. ``whole`` is False if only the newest :data:`COUNTED` were counted."""

    choices: dict[str, list[Choice]]
    whole: bool


FACETS = ("state", "backend", "owner", "tag")


def facets(terms: Sequence[Term], *, user: Any = None) -> Facets:
    """The choices of each facet, counted among the runs that match all other terms."""
    wanted: dict[tuple[Term, ...], list[str]] = {}
    for name in FACETS:
        wanted.setdefault(tuple(t for t in terms if t.field != name), []).append(name)
    counts: dict[str, Counter[str]] = {}
    whole = True
    for others, names in wanted.items():
        result, complete = _count(others, names, user)
        counts |= result
        whole &= complete
    return Facets(
        choices={
            name: _choices(
                counts[name],
                {v for t in terms if t.field == name and not t.negated for v in t.values},
            )
            for name in FACETS
        },
        whole=whole,
    )


def counted(name: str, *, user: Any = None) -> Counter[str]:
    """The values of one facet among the newest runs. One query."""
    return _count((), [name], user)[0][name]


def _count(
    terms: Sequence[Term], names: Sequence[str], user: Any
) -> tuple[dict[str, Counter[str]], bool]:
    """Counts of the values of these facets, and whether all runs were counted.

    One query, and one more for backends. The values of the newest runs are counted here, because a
    database that groups runs reads all of them.
    """
    newest = matching(Run.objects.order_by("-created_at", "-id"), terms, user=user)
    columns = {"state": "state", "owner": "owner__username", "tag": "tags"}
    read = [name for name in names if name in columns]
    rows = list(newest.values_list("pk", *(columns[name] for name in read))[: COUNTED + 1])
    counts: dict[str, Counter[str]] = {}
    for place, name in enumerate(read, start=1):
        values = (row[place] for row in rows[:COUNTED])
        counts[name] = (
            Counter(str(tag) for tags in values for tag in texts(tags))
            if name == "tag"
            else Counter(values)
        )
    if "backend" in names:
        pools = ReplicaPool.objects.filter(run__in=newest.values("pk")[:COUNTED]).order_by()
        counted = pools.values_list("backend").annotate(n=Count("run", distinct=True))
        counts["backend"] = Counter(dict(counted))
    return counts, len(rows) <= COUNTED


def _choices(counts: Counter[str], chosen: set[str]) -> list[Choice]:
    every = {**dict.fromkeys(chosen, 0), **counts}
    order = {str(state): place for place, state in enumerate(RunState.values)}
    return [
        Choice(value=value, count=n, chosen=value in chosen)
        for value, n in sorted(
            every.items(), key=lambda item: (order.get(item[0], 99), -item[1], item[0])
        )
    ]


def backends(runs: Sequence[Run], *, whole: bool = False) -> dict[uuid.UUID, str]:
    """Names of each run's backends. One query; ``whole`` also prefetches the pools with it."""
    if whole:
        prefetch_related_objects(runs, "pools")
        pools = [(run.pk, pool.backend) for run in runs for pool in run.pools.all()]
    else:
        rows = ReplicaPool.objects.filter(AmongIds("run", [run.pk for run in runs])).order_by("id")
        pools = list(rows.values_list("run", "backend"))
    names: dict[uuid.UUID, dict[str, None]] = {}
    for run, backend in pools:
        names.setdefault(run, {})[backend] = None
    return {run: ", ".join(own) for run, own in names.items()}


def sparks(runs: Sequence[Run]) -> dict[uuid.UUID, list[float]]:
    """A few values of each run's evaluation loss, oldest first. One query."""
    rows = (
        MetricBlock.objects.filter(
            AmongIds("run", [run.pk for run in runs]),
            Q(index=0) | Q(level=LEVELS[-1]),
            replica=None,
            series="eval_loss",
        )
        .order_by("run", "-level", "index")
        .values_list("run", "level", "count", "data")
    )
    blocks: dict[uuid.UUID, dict[int, list[tuple[int, bytes]]]] = {}
    for run, level, count, data in rows:
        blocks.setdefault(run, {}).setdefault(level, []).append((count, bytes(data)))
    result = {}
    for run, by_level in blocks.items():
        whole = sum(count for count, _ in by_level[LEVELS[-1]])
        finest = min(n for n, rows in by_level.items() if sum(c for c, _ in rows) == whole)
        points = concatenate([Points.unpack(data) for _, data in by_level[finest]])
        values = [v for v in points.value.tolist() if math.isfinite(v)]
        every = max(1, -(-len(values) // SPARK_POINTS))
        result[run] = [*values[:-1:every], *values[-1:]]
    return result
