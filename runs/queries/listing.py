"""Pages of the runs list in any order, what can be chosen from, and the small curves in the rows.

Pages are by key: the value that is sorted by and the id, so that a far page costs what a near one
does and no run is lost or comes twice. What is not known sorts last, whichever way. Each function
costs a constant number of queries, :func:`facets` at most one more for each facet that the query
narrows.
"""

from __future__ import annotations

import datetime
import math
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, F, Q, QuerySet
from django.utils.dateparse import parse_datetime

from runs.json_values import texts
from runs.metrics.blocks import Points
from runs.models import MetricBlock, ReplicaPool, Run
from runs.queries.search import Term, matching
from runs.states import RunState

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
"""Name in the address -> column."""
RISING = ("name", "loss", "train")
"""Those that rise at a first press; the indexes of :class:`Run` are in these directions."""
NEWEST = "-created"
SPARK_POINTS = 40
COUNTED = 2000
"""Newest runs of a query that its facets count: so they cost the same with a million."""


@dataclass(frozen=True, kw_only=True)
class Order:
    name: str = "created"
    falling: bool = True

    @classmethod
    def of(cls, text: str) -> Order:
        """``-loss`` falls; anything unknown is newest first."""
        name = text.removeprefix("-")
        return cls(name=name, falling=text.startswith("-")) if name in SORTS else cls()

    def __str__(self) -> str:
        return f"{'-' if self.falling else ''}{self.name}"

    @property
    def column(self) -> str:
        return SORTS[self.name]

    @property
    def turned(self) -> bool:
        """Whether it is the other way round than a first press. Then runs of one value are as well,
        so that one index, read backwards, serves."""
        return self.falling == (self.name in RISING)

    @property
    def nullable(self) -> bool:
        """Whether runs may have no value."""
        return bool(Run._meta.get_field(self.column).null)


def page(
    runs: QuerySet[Run], order: Order, *, after: str = "", limit: int = 50
) -> tuple[list[Run], str]:
    """Runs in order, and where the next page begins ('' on the last). ``after`` that is no place
    of this order shows the first page."""
    place = _place(order, after)
    if place is not None:
        runs = runs.filter(_beyond(order, *place))
    # Nothing is said of unknown values where there are none: only so do PostgreSQL's indexes serve.
    unknown_last = True if order.nullable else None
    column = F(order.column)
    by = (
        column.desc(nulls_last=unknown_last)
        if order.falling
        else column.asc(nulls_last=unknown_last)
    )
    found = list(runs.order_by(by, "id" if order.turned else "-id")[: limit + 1])
    shown = found[:limit]
    return shown, _written(order, shown[-1]) if len(found) > limit else ""


def is_place(order: Order, text: str) -> bool:
    """Whether a page begins there; what is none of this order's shows the first page."""
    return _place(order, text) is not None


def _beyond(order: Order, value: Any, pk: uuid.UUID) -> Q:
    column, rest = order.column, "pk__gt" if order.turned else "pk__lt"
    if value is None:
        return Q(**{f"{column}__isnull": True, rest: pk})
    way = "lt" if order.falling else "gt"
    later = Q(**{f"{column}__{way}": value}) | Q(**{column: value, rest: pk})
    if order.nullable:
        return later | Q(**{f"{column}__isnull": True})
    # Said once more without an "or", so that a database begins there instead of at the first row.
    return Q(**{f"{column}__{way}e": value}) & later


def _written(order: Order, run: Run) -> str:
    value = getattr(run, order.column)
    if isinstance(value, datetime.datetime):
        value = value.isoformat()
    return f"{'' if value is None else value}_{run.pk}"


def _place(order: Order, text: str) -> tuple[Any, uuid.UUID] | None:
    """What :func:`_written` wrote; None for anything else."""
    written, _, pk = text.rpartition("_")
    try:
        return _read(order, written), uuid.UUID(pk)
    except ValueError:
        return None


def _read(order: Order, text: str) -> Any:
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
        return moment
    number = int(text) if order.name in ("rounds", "tokens") else float(text)
    if not math.isfinite(number) or abs(number) >= 2**63:
        raise ValueError(text)
    return number


@dataclass(frozen=True, kw_only=True)
class Choice:
    value: str
    count: int
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class Facets:
    """``whole`` is False where only the newest :data:`COUNTED` runs were counted."""

    choices: dict[str, list[Choice]]
    whole: bool


FACETS = ("state", "backend", "owner", "tag")


def facets(terms: Sequence[Term], *, user: Any = None) -> Facets:
    """What each facet can narrow to, and to how many runs, with all terms but its own."""
    wanted: dict[tuple[Term, ...], list[str]] = {}
    for name in FACETS:
        wanted.setdefault(tuple(t for t in terms if t.field != name), []).append(name)
    counts: dict[str, Counter[str]] = {}
    whole = True
    for others, names in wanted.items():
        found, all_of_them = _count(others, names, user)
        counts |= found
        whole &= all_of_them
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


def _count(
    terms: Sequence[Term], names: Sequence[str], user: Any
) -> tuple[dict[str, Counter[str]], bool]:
    """How often each value of these facets comes, and whether in all runs. One query, and one for
    backends: values of the newest runs are read and counted here, because a database that groups
    all of them reads all of them."""
    newest = matching(Run.objects.order_by("-created_at", "-id"), terms, user=user)
    columns = {"state": "state", "owner": "owner__username", "tag": "tags"}
    read = [name for name in names if name in columns]
    rows = list(newest.values_list("pk", *(columns[name] for name in read))[: COUNTED + 1])
    found: dict[str, Counter[str]] = {}
    for place, name in enumerate(read, start=1):
        values = (row[place] for row in rows[:COUNTED])
        found[name] = (
            Counter(str(tag) for tags in values for tag in texts(tags))
            if name == "tag"
            else Counter(values)
        )
    if "backend" in names:
        pools = ReplicaPool.objects.filter(run__in=newest.values("pk")[:COUNTED]).order_by()
        counted = pools.values_list("backend").annotate(n=Count("run", distinct=True))
        found["backend"] = Counter(dict(counted))
    return found, len(rows) <= COUNTED


def _choices(counts: Counter[str], chosen: set[str]) -> list[Choice]:
    every = {**dict.fromkeys(chosen, 0), **counts}
    order = {str(state): place for place, state in enumerate(RunState.values)}
    return [
        Choice(value=value, count=n, chosen=value in chosen)
        for value, n in sorted(
            every.items(), key=lambda item: (order.get(item[0], 99), -item[1], item[0])
        )
    ]


def sparks(runs: Sequence[Run]) -> dict[uuid.UUID, list[float]]:
    """A few values of each run's evaluation loss, oldest first; one query."""
    rows = (
        MetricBlock.objects.filter(run__in=runs, replica=None, series="eval_loss", index=0)
        .order_by("run", "level")
        .values_list("run", "data")
    )
    # The coarsest level comes last, and of it block 0 is all there is.
    coarsest = {run: bytes(data) for run, data in rows}
    found = {}
    for run, data in coarsest.items():
        values = [v for v in Points.unpack(data).value.tolist() if math.isfinite(v)]
        every = max(1, -(-len(values) // SPARK_POINTS))
        found[run] = [*values[:-1:every], *values[-1:]]
    return found
