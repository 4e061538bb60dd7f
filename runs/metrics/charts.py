"""Read series for a chart: a window, with as many points as a screen can show.

A window is given on an axis of the chart. The outline of a series (its coarsest level) shows which
buckets the ends of the window are in, and the blocks below them give the exact keys. Then the
level is read that has enough buckets, and downsampled to the requested number of points. A response
costs at most six queries, for a thousand points or a million. Buckets at the edges of the window
are complete: they include their minimum and maximum even if these lie just outside.

:meth:`runs.metrics.blocks.Points.to_json` converts the points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from django.db.models import Q, QuerySet, Sum
from numpy.typing import NDArray

from runs.metrics.blocks import LEVELS, Key, Points, slices, thin_each, unpack_all, width
from runs.models import MetricBlock, Replica, Run

Axis = Literal["step", "round", "tokens", "wall"]
AXES: tuple[Axis, ...] = ("step", "round", "tokens", "wall")
_COLUMN: dict[Axis, str] = {"step": "step", "round": "round", "tokens": "tokens", "wall": "wall_s"}

Owner = int | None
"""Number of a replica; None for the series of the run itself."""
Name = tuple[str, Owner]

PROBED = 16
"""Number of series that are sampled for the keys of a window. The union of their keys is used."""
OUTLINE = LEVELS[-1]


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Conversion of columns to the axes of a chart.

    For series of replicas, the round is fractional (the step divided by ``sync_every``), and the
    tokens are multiplied by the number of replicas.
    """

    sync_every: int = 1
    replicas: int = 1

    def of(self, axis: Axis, owner: Owner) -> tuple[str, float]:
        """(column, factor) of an axis."""
        if owner is not None and axis == "round":
            return "step", 1 / self.sync_every
        return _COLUMN[axis], self.replicas if owner is not None and axis == "tokens" else 1

    def x(self, points: Points, axis: Axis, owner: Owner) -> NDArray[Any]:
        column, factor = self.of(axis, owner)
        values: NDArray[Any] = getattr(points, column) * factor
        return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A window of one series.

    ``total`` is the number of points before downsampling, ``level`` that of the buckets (0: all
    points are included).
    """

    series: str
    owner: Owner
    points: Points
    total: int
    level: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """A range on ``axis`` (None: up to the end of the data), and the points per series."""

    axis: Axis = "step"
    low: float | None = None
    high: float | None = None
    max_points: int = 2000
    scales: Scales = Scales()


def key_of(owner: Owner) -> Key:
    """The key of a series of that owner."""
    return "round" if owner is None else "step"


def read(run: Run, wanted: Iterable[Name], window: Window) -> list[Curve]:
    """Read the curves of the series that have points.

    All curves of replicas have the same buckets, and so have all curves of the run. The number of
    queries does not depend on the number of series.
    """
    return downsample(read_stored(run, wanted, window), window.max_points)


def read_stored(run: Run, wanted: Iterable[Name], window: Window) -> list[Curve]:
    """Like :func:`read` before downsampling: all points of the stored level. ``level`` is the one
    to which :func:`downsample` takes them."""
    wanted = list(wanted)
    table = _Table.of(run, wanted)
    outlines = table.parts(table.where(wanted, level=OUTLINE))
    spans = _spans(table, outlines, window)
    levels = {key: _level(span, window.max_points) for key, span in spans.items()}
    for key, level in levels.items():
        first, last = spans[key]
        # One more bucket before the window, so that the line enters from its edge.
        first = max((first >> level) - (level > 0), 0) << level
        spans[key] = (first, ((last >> level) + 1 << level) - 1)
    parts = _parts(table, outlines, spans, levels)
    whole = window.low is None and window.high is None
    totals = {} if whole else _totals(table, outlines, spans, levels)
    curves = []
    for name, outline in outlines.items():
        key = key_of(name[1])
        points = _within(parts[name].points, key, spans[key])
        total = outline.total if whole else totals.get(name, len(points))
        curves.append(
            Curve(series=name[0], owner=name[1], points=points, total=total, level=levels[key])
        )
    return curves


def downsample(curves: Sequence[Curve], max_points: int) -> list[Curve]:
    """Downsample the points of curves to their ``level``, or to a coarser one that has at most
    ``max_points``."""
    result: dict[Name, Curve] = {}
    keys: tuple[Key, ...] = ("step", "round")
    for owner_key in keys:
        for level in {c.level for c in curves}:
            same = [c for c in curves if c.level == level and key_of(c.owner) == owner_key]
            thinned = thin_each([c.points for c in same], owner_key, max_points, level)
            result |= {
                (c.series, c.owner): replace(c, points=kept, level=coarser)
                for c, (kept, coarser) in zip(same, thinned, strict=True)
            }
    return [result[c.series, c.owner] for c in curves]


def lasts(curve: Curve) -> Curve:
    """Only the last point of each bucket, which aligns the series of one window."""
    bucket = getattr(curve.points, key_of(curve.owner)) >> curve.level
    return replace(
        curve,
        points=curve.points.take(
            np.append(bucket[1:] != bucket[:-1], len(bucket) > 0)[: len(bucket)]
        ),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """Consecutive blocks of one level of a series, and the number of points below them."""

    points: Points = field(default_factory=Points.empty)
    total: int = 0


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The blocks of some series.

    Every term contains run and replica, and nothing is joined, so that each is an index lookup.
    """

    run: Run
    ids: Mapping[int, int]

    @classmethod
    def of(cls, run: Run, wanted: Iterable[Name]) -> _Table:
        numbers = {owner for _, owner in wanted if owner is not None}
        replicas = (
            Replica.objects.filter(run=run, number__in=numbers)
            if numbers
            else Replica.objects.none()
        )
        return cls(run=run, ids=dict(replicas.values_list("number", "pk")))

    def where(self, names: Iterable[Name], **more: Any) -> Q:
        """Condition for the rows of some series, with few terms."""
        owners: dict[Owner, set[str]] = {}
        for series, owner in names:
            owners.setdefault(owner, set()).add(series)
        replicas_of: dict[frozenset[str], list[int]] = {}
        terms = Q()
        for owner, series_set in owners.items():
            if owner is None:
                terms |= Q(run=self.run, replica=None, series__in=sorted(series_set), **more)
            elif owner in self.ids:
                replicas_of.setdefault(frozenset(series_set), []).append(self.ids[owner])
        for shared, ids in replicas_of.items():
            terms |= Q(run=self.run, replica__in=ids, series__in=sorted(shared), **more)
        return terms

    def blocks(self, terms: Q) -> QuerySet[MetricBlock]:
        return MetricBlock.objects.filter(terms) if terms else MetricBlock.objects.none()

    def name(self, series: str, replica_id: int | None) -> Name:
        return series, None if replica_id is None else self._numbers[replica_id]

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        return {pk: number for number, pk in self.ids.items()}

    def parts(self, terms: Q) -> dict[Name, _Part]:
        """The blocks of each series, joined in order."""
        rows = (
            self.blocks(terms)
            .order_by("series", "replica_id", "index")
            .values_list("series", "replica_id", "data", "count")
        )
        names, blocks, below = [], [], []
        for series, replica_id, data, count in rows:
            names.append((series, replica_id))
            blocks.append(bytes(data))
            below.append(count)
        points, counts = unpack_all(blocks)
        sizes: dict[tuple[str, int | None], list[int]] = {}  # in the order of the rows
        for pair, count, total in zip(names, counts, below, strict=True):
            size = sizes.setdefault(pair, [0, 0])
            size[0] += count
            size[1] += total
        parts = slices(points, (count for count, _ in sizes.values()))
        return {
            self.name(*pair): _Part(points=part, total=total)
            for (pair, (_, total)), part in zip(sizes.items(), parts, strict=True)
        }


def _spans(
    table: _Table, outlines: Mapping[Name, _Part], window: Window
) -> dict[Key, tuple[int, int]]:
    """First and last key of the window, for series of replicas and for those of the run.

    They are those of the points next to the window, if there are any.
    """
    ends: dict[Key, list[_Ends]] = {"step": [], "round": []}
    for key, of_key in ends.items():
        names = [name for name in outlines if key_of(name[1]) == key]
        if window.low is not None or window.high is not None:
            names = names[:: -(-len(names) // PROBED) or 1]
        of_key += [_Ends.of(name, outlines[name].points, window) for name in names]
    unclear = [end for of_key in ends.values() for end in of_key if end.blocks]
    terms = Q()
    for end in unclear:
        terms |= table.where([end.name], level=0, index__in=end.blocks)
    details = table.parts(terms)
    for end in unclear:
        end.narrow(details.get(end.name, _Part()).points, window)
    return {
        key: (min(end.first for end in of_key), max(end.last for end in of_key))
        for key, of_key in ends.items()
        if of_key
    }


@dataclass
class _Ends:
    """The keys of the last point before a window and of the first after it, or of the ends of the
    data. ``blocks`` are those in which points can be that are nearer to the window."""

    name: Name
    first: int
    last: int
    blocks: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, name: Name, outline: Points, window: Window) -> _Ends:
        keys = getattr(outline, key_of(name[1]))
        # A bucket always has its last point, but not its first, so the first key is rounded down.
        result = cls(name, int(keys[0]) >> OUTLINE << OUTLINE, int(keys[-1]))
        result.narrow(outline, window)
        # Between two points of the outline, other points are only in the bucket of the second.
        after = keys[np.searchsorted(keys, result.first, side="right") :][:1].tolist()
        for key in (after if window.low is not None else []) + (
            [result.last] if window.high is not None else []
        ):
            low = key >> OUTLINE << OUTLINE
            result.blocks |= set(range(low // width(0), key // width(0) + 1))
        return result

    def narrow(self, points: Points, window: Window) -> None:
        keys = getattr(points, key_of(self.name[1]))
        x = window.scales.x(points, window.axis, self.name[1])
        if window.low is not None:
            self.first = max([self.first, *keys[x < window.low].tolist()[-1:]])
        if window.high is not None:
            self.last = min([self.last, *keys[x > window.high].tolist()[:1]])


def _level(span: tuple[int, int], max_points: int) -> int:
    """The finest level with few enough buckets, counting three points each and the edges."""
    keys = span[1] - span[0] + 1
    if keys <= max_points:
        return 0
    level = 1
    while ((keys >> level) + 3) * 3 > max(max_points, 12):
        level += 1
    return level


def _parts(
    table: _Table,
    outlines: Mapping[Name, _Part],
    spans: Mapping[Key, tuple[int, int]],
    levels: Mapping[Key, int],
) -> dict[Name, _Part]:
    """Points of the spans, from the coarsest stored level that is detailed enough."""
    terms = Q()
    for key, span in spans.items():
        level = max(level for level in (0, *LEVELS) if level <= levels[key])
        first, last = (end // width(level) for end in span)
        names = [name for name in outlines if key_of(name[1]) == key]
        if level < OUTLINE:
            terms |= table.where(names, level=level, index__gte=first, index__lte=last)
    return {**outlines, **table.parts(terms)}


def _totals(
    table: _Table,
    outlines: Mapping[Name, _Part],
    spans: Mapping[Key, tuple[int, int]],
    levels: Mapping[Key, int],
) -> dict[Name, int]:
    """Number of points in the spans: stored counts within, and counted points at the edges."""
    between, edges = Q(), Q()
    for key, span in spans.items():
        names = [name for name in outlines if key_of(name[1]) == key]
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
    for name, part in table.parts(edges).items():
        key = key_of(name[1])
        totals[name] = totals.get(name, 0) + len(_within(part.points, key, spans[key]))
    return totals


def _within(points: Points, key: Key, span: tuple[int, int]) -> Points:
    keys = getattr(points, key)
    if len(keys) and keys[0] >= span[0] and keys[-1] <= span[1]:
        return points  # sorted by key
    return points.take((keys >= span[0]) & (keys <= span[1]))


def names_of(run: Run, series: Sequence[str] | None = None) -> list[Name]:
    """The (series, owner) pairs that have points."""
    blocks = MetricBlock.objects.filter(run=run)
    if series is not None:
        blocks = blocks.filter(series__in=series)
    pairs = blocks.order_by().values_list("series", "replica__number").distinct()
    return sorted(pairs, key=lambda pair: (pair[0], -1 if pair[1] is None else pair[1]))
