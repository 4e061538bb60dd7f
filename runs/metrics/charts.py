"""Series read for a chart: a window of them, of as many points as a screen can show.

A window is given on an axis of the chart. The coarsest roll-up of a series is one block; it tells
which keys the window spans, finer ones make that exact, and then the blocks are read whose level
has about as many buckets as are wanted. So an answer costs a few queries and kilobytes, of a
thousand points or of a million. Buckets at the window's edges are whole: the lowest and the
highest point in them are there even where they lie just outside.

What JSON is made of the points is :mod:`runs.metrics.columns`' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from django.db.models import Max, Q, QuerySet, Sum
from numpy.typing import NDArray

from runs.metrics.blocks import LEVELS, Key, Points, concatenate, keep, width
from runs.models import MetricBlock, Replica, Run

Axis = Literal["step", "round", "tokens", "wall"]
AXES: tuple[Axis, ...] = ("step", "round", "tokens", "wall")
_COLUMN: dict[Axis, str] = {"step": "step", "round": "round", "tokens": "tokens", "wall": "wall_s"}

Owner = int | None
"""A replica's number; None for the run's own series."""
Name = tuple[str, Owner]

PROBED = 16
"""Series that are asked where a window begins; more have the union of theirs."""
PRECISION = 100
"""A window's ends are found to within this part of it."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """From columns to a group's axes. A replica's rounds go on within a round (its steps over
    ``sync_every``), and its tokens stand for those of all ``replicas``."""

    sync_every: int = 1
    replicas: int = 1

    def of(self, axis: Axis, owner: Owner) -> tuple[str, float]:
        """The column of an axis, and what its values are multiplied by."""
        if owner is not None and axis == "round":
            return "step", 1 / self.sync_every
        return _COLUMN[axis], self.replicas if owner is not None and axis == "tokens" else 1

    def x(self, points: Points, axis: Axis, owner: Owner) -> NDArray[Any]:
        column, factor = self.of(axis, owner)
        values: NDArray[Any] = getattr(points, column) * factor
        return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A window of one series. ``total`` points were there to choose from; ``level`` of the buckets
    they were chosen by, 0 where none was left out."""

    series: str
    owner: Owner
    points: Points
    total: int
    level: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """What to read: ends on ``axis`` (None: where the data ends), at most so many points each."""

    axis: Axis = "step"
    low: float | None = None
    high: float | None = None
    max_points: int = 2000
    scales: Scales = Scales()


def key_of(owner: Owner) -> Key:
    return "round" if owner is None else "step"


def read(run: Run, wanted: Iterable[Name], window: Window) -> list[Curve]:
    """The curves of ``wanted`` that have points. Those of replicas have the same buckets, and so
    have those of the run. The number of queries does not depend on how many there are."""
    wanted = list(wanted)
    table = _Table.of(run, wanted)
    tops = _tops(table, wanted)
    spans = _spans(table, tops, window)
    levels = {key: _level(span, window.max_points) for key, span in spans.items()}
    for key, level in levels.items():
        first, last = spans[key]
        # One bucket more before the window, so that a line comes in from its edge.
        first = max((first >> level) - (level > 0), 0) << level
        spans[key] = (first, ((last >> level) + 1 << level) - 1)
    parts = _parts(table, tops, spans, levels)
    whole = window.low is None and window.high is None
    totals = {} if whole else _totals(table, tops, spans, levels)
    found = []
    for name, top in tops.items():
        key, level = key_of(name[1]), levels[key_of(name[1])]
        kept = _within(parts.get(name, top.points), key, spans[key])
        kept = keep(kept, key, level)
        while len(kept) > window.max_points and level < LEVELS[-1]:
            level += 1  # more than three points in many buckets
            kept = keep(kept, key, level)
        total = top.total if whole else totals.get(name, len(kept))
        found.append(Curve(series=name[0], owner=name[1], points=kept, total=total, level=level))
    return found


def lasts(curve: Curve) -> Curve:
    """The last point of each bucket alone: series of one window then have the same places."""
    bucket = getattr(curve.points, key_of(curve.owner)) >> curve.level
    return replace(
        curve,
        points=curve.points.take(
            np.append(bucket[1:] != bucket[:-1], len(bucket) > 0)[: len(bucket)]
        ),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Top:
    """The one block of a series' coarsest level."""

    level: int
    points: Points
    total: int


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The blocks of some series. Run and replica are in every term and nothing is joined, so that
    each is a look-up in the index."""

    run: Run
    ids: Mapping[int, int]

    @classmethod
    def of(cls, run: Run, wanted: Iterable[Name]) -> _Table:
        numbers = {owner for _, owner in wanted if owner is not None}
        found = (
            Replica.objects.filter(run=run, number__in=numbers)
            if numbers
            else Replica.objects.none()
        )
        return cls(run=run, ids=dict(found.values_list("number", "pk")))

    def where(self, names: Iterable[Name], **more: Any) -> Q:
        """Rows of some series, in few terms."""
        owners: dict[Owner, set[str]] = {}
        for series, owner in names:
            owners.setdefault(owner, set()).add(series)
        alike: dict[frozenset[str], list[int]] = {}
        terms = Q()
        for owner, mine in owners.items():
            if owner is None:
                terms |= Q(run=self.run, replica=None, series__in=sorted(mine), **more)
            elif owner in self.ids:
                alike.setdefault(frozenset(mine), []).append(self.ids[owner])
        for together, ids in alike.items():
            terms |= Q(run=self.run, replica__in=ids, series__in=sorted(together), **more)
        return terms

    def blocks(self, terms: Q) -> QuerySet[MetricBlock]:
        return MetricBlock.objects.filter(terms) if terms else MetricBlock.objects.none()

    def name(self, series: str, replica_id: int | None) -> Name:
        return series, None if replica_id is None else self._numbers[replica_id]

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        return {pk: number for number, pk in self.ids.items()}

    def rows(self, terms: Q) -> Iterable[tuple[Name, int, Points, int]]:
        """(series, level, points, count) of blocks, in order."""
        rows = (
            self.blocks(terms)
            .order_by("series", "replica_id", "level", "index")
            .values_list("series", "replica_id", "level", "data", "count")
        )
        for series, replica_id, level, data, count in rows:
            yield self.name(series, replica_id), level, Points.unpack(bytes(data)), count


def _tops(table: _Table, wanted: Iterable[Name]) -> dict[Name, _Top]:
    # The coarsest level is block 0 alone, so the others need not be looked at.
    levels = (
        table.blocks(table.where(wanted, index=0))
        .order_by()
        .values_list("series", "replica_id")
        .annotate(top=Max("level"))
    )
    by_level: dict[int, list[Name]] = {}
    for series, replica_id, level in levels:
        by_level.setdefault(level, []).append(table.name(series, replica_id))
    terms = Q()
    for level, names in by_level.items():
        terms |= table.where(names, level=level, index=0)
    known = {(name, level) for level, names in by_level.items() for name in names}
    return {
        name: _Top(level=level, points=points, total=count)
        for name, level, points, count in table.rows(terms)
        if (name, level) in known
    }


def _spans(table: _Table, tops: Mapping[Name, _Top], window: Window) -> dict[Key, tuple[int, int]]:
    """First and last key of the window, for replicas' series and for the run's."""
    spans: dict[Key, tuple[int, int]] = {}
    for key in ("step", "round"):
        names = [name for name in tops if key_of(name[1]) == key and len(tops[name].points)]
        if not names:
            continue
        ends = {name: _Ends.of(tops[name], key) for name in names}
        if window.low is not None or window.high is not None:
            probed = names[:: -(-len(names) // PROBED)]
            ends = {name: ends[name] for name in probed}
            _narrow(table, {name: tops[name] for name in probed}, ends, window)
        spans[key] = (min(e.first for e in ends.values()), max(e.last for e in ends.values()))
    return spans


@dataclass
class _Ends:
    """A window's first key lies in [first, first_in], its last one in [last_in, last]."""

    first: int
    first_in: int
    last_in: int
    last: int

    @classmethod
    def of(cls, top: _Top, key: Key) -> _Ends:
        keys = getattr(top.points, key)
        # A roll-up has the last point, but need not have the first: its bucket's begin, then.
        first, last = int(keys[0]) >> top.level << top.level, int(keys[-1])
        return cls(first, last, first, last)

    def narrow(self, keys: NDArray[Any], x: NDArray[Any], window: Window) -> None:
        if window.low is not None:
            self.first = max([self.first, *keys[x < window.low].tolist()[-1:]])
            self.first_in = min([self.first_in, *keys[x >= window.low].tolist()[:1]])
        else:
            self.first_in = self.first
        if window.high is not None:
            self.last = min([self.last, *keys[x > window.high].tolist()[:1]])
            self.last_in = max([self.last_in, *keys[x <= window.high].tolist()[-1:]])
        else:
            self.last_in = self.last

    def settled(self) -> bool:
        enough = max(1, (self.last_in - self.first_in) // PRECISION)
        return self.first_in - self.first <= enough and self.last - self.last_in <= enough


def _narrow(
    table: _Table, tops: Mapping[Name, _Top], ends: Mapping[Name, _Ends], window: Window
) -> None:
    """Find the ends of the window in ever finer levels, a few blocks and one query each."""

    def look(name: Name, points: Points) -> None:
        x = window.scales.x(points, window.axis, name[1])
        ends[name].narrow(getattr(points, key_of(name[1])), x, window)

    for name, top in tops.items():
        look(name, top.points)
    for level in reversed((0, *LEVELS)):
        places: dict[int, list[Name]] = {}
        for name, end in ends.items():
            if level >= tops[name].level or end.settled():
                continue
            for key in (end.first, end.first_in, end.last_in, end.last):
                places.setdefault(key // width(level), []).append(name)
        terms = Q()
        for index, names in places.items():
            terms |= table.where(names, level=level, index=index)
        for name, _, points, _ in table.rows(terms):
            if name in ends:
                look(name, points)


def _level(span: tuple[int, int], max_points: int) -> int:
    """The finest level whose buckets, of three points each and with those at the edges, are few."""
    keys = span[1] - span[0] + 1
    if keys <= max_points:
        return 0
    level = 1
    while ((keys >> level) + 3) * 3 > max_points and level < LEVELS[-1]:
        level += 1
    return level


def _parts(
    table: _Table,
    tops: Mapping[Name, _Top],
    spans: Mapping[Key, tuple[int, int]],
    levels: Mapping[Key, int],
) -> dict[Name, Points]:
    """Points of the spans, from the coarsest stored level that is fine enough."""
    wanted: dict[tuple[int, Key], list[Name]] = {}
    for name, top in tops.items():
        key = key_of(name[1])
        stored = max(level for level in (0, *LEVELS) if level <= levels[key])
        if stored < top.level:
            wanted.setdefault((stored, key), []).append(name)
    terms = Q()
    for (level, key), names in wanted.items():
        first, last = (end // width(level) for end in spans[key])
        terms |= table.where(names, level=level, index__gte=first, index__lte=last)
    parts: dict[Name, list[Points]] = {}
    for name, _, points, _ in table.rows(terms):
        parts.setdefault(name, []).append(points)
    return {name: concatenate(parts.get(name, [])) for names in wanted.values() for name in names}


def _totals(
    table: _Table,
    tops: Mapping[Name, _Top],
    spans: Mapping[Key, tuple[int, int]],
    levels: Mapping[Key, int],
) -> dict[Name, int]:
    """Points in the spans: of blocks within them as stored, of those at the edges as counted."""
    between, edges = Q(), Q()
    for key, span in spans.items():
        names = [name for name in tops if key_of(name[1]) == key]
        if levels[key] == 0:
            continue
        first, last = (end // width(0) for end in span)
        between |= table.where(names, level=0, index__gt=first, index__lt=last)
        edges |= table.where(names, level=0, index__in=[first, last])
    rows = (
        table.blocks(between)
        .order_by()
        .values_list("series", "replica_id")
        .annotate(total=Sum("count"))
    )
    totals = {table.name(series, pk): int(total) for series, pk, total in rows}
    for name, _, points, _ in table.rows(edges):
        key = key_of(name[1])
        totals[name] = totals.get(name, 0) + len(_within(points, key, spans[key]))
    return totals


def _within(points: Points, key: Key, span: tuple[int, int]) -> Points:
    keys = getattr(points, key)
    return points.take((keys >= span[0]) & (keys <= span[1]))


def names_of(run: Run, series: Sequence[str] | None = None) -> list[Name]:
    """(series, owner) that have points."""
    blocks = MetricBlock.objects.filter(run=run)
    if series is not None:
        blocks = blocks.filter(series__in=series)
    found = blocks.order_by().values_list("series", "replica__number").distinct()
    return sorted(found, key=lambda pair: (pair[0], -1 if pair[1] is None else pair[1]))
