"""Points into the tables: their own blocks, and the roll-ups above them, in one transaction.

A block of points that changes replaces its buckets in the roll-up above, that one its own in the
next: a few rows per series whatever its length, and the same rows whether points came one by one,
all at once, twice or late. ``count`` of a roll-up is how many points lie beneath it.

A level exists as soon as the one below has a block besides its first. When it begins, and only
then, it is made from all that lies below (:func:`_begin`); series that are older than the roll-ups
get theirs in the same way (:func:`build`).

This is what every tick of every replica goes through, so the few statements are written out: built
by the ORM they took three quarters of the time. Names of tables and columns in them are our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from django.db import connection

from runs.models import MetricBlock
from runs.series.blocks import LEVELS, Key, Points, keep, merge, put_range, split, width

Place = tuple[str, int, int]
"""Series, level, index."""

_ALL = (0, *LEVELS)


@dataclass(frozen=True, kw_only=True)
class _Change:
    """Of one block: by how many points it grew, and the keys in [low, high) that may be new."""

    count: int
    low: int
    high: int

    def __or__(self, other: _Change) -> _Change:
        return _Change(
            count=self.count + other.count,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
        )


def add_points(
    run: Any, replica: Any, new: Mapping[str, Points], *, key: Key, model: Any = MetricBlock
) -> dict[str, Points]:
    """Merge points into their blocks; the newest block of each series, for whoever needs a tail.

    ``run`` and ``replica`` (None: a series of the run) are rows, or their ids. ``model``: a
    migration's own."""
    parts = {
        (series, 0, index): part
        for series, points in new.items()
        for index, part in split(points, key)
    }
    writer = _Writer(_id(run), _id(replica), key, model)
    writer.load({above for place in parts for above in _over(place)})
    newest: dict[str, Points] = {}
    changes: dict[Place, _Change] = {}
    for place, part in sorted(parts.items(), key=lambda item: item[0]):
        before = writer.read(place)
        merged = newest[place[0]] = merge(before, part, key)
        writer.write(place, merged, len(merged) - len(before))
        keys = getattr(part, key)
        changes[place] = _Change(
            count=len(merged) - len(before), low=int(keys.min()), high=int(keys.max()) + 1
        )
    while changes:
        changes = _roll_up(writer, changes)
    writer.save()
    return newest


def build(run: Any, replica: Any, series: str, *, key: Key, model: Any = MetricBlock) -> None:
    """All roll-ups of a series that has none yet."""
    writer = _Writer(_id(run), _id(replica), key, model)
    for below, level in zip(_ALL, LEVELS, strict=False):
        if not any(index for _, index in writer.of_level(series, below, load=True)):
            break
        _begin(writer, series, level)
    writer.save()


def _id(row: Any) -> Any:
    return getattr(row, "pk", row)


@dataclass
class _Row:
    """A row of the table; ``pk`` is None for one that is not there yet."""

    pk: int | None = None
    count: int = 0
    data: bytes = b""


@dataclass
class _Writer:
    """Rows of one owner (a replica, or the run itself): read in one query, written in two."""

    run_id: Any
    replica_id: Any
    key: Key
    model: Any = MetricBlock
    rows: dict[Place, _Row] = field(default_factory=dict)
    points: dict[Place, Points] = field(default_factory=dict)
    changed: set[Place] = field(default_factory=set)
    tops: dict[str, int] = field(default_factory=dict)
    """The coarsest level of each series, -1 without any."""

    def load(self, places: Iterable[Place]) -> None:
        """In one query, a look-up by index for each place.

        ``places`` are the blocks of some keys on all levels: a series that has a row among them has
        its single coarsest block among them. What the coarsest of the others is, is asked for."""
        wanted = sorted(places)
        if not wanted:
            return
        terms = ", ".join(["(%s, %s, %s)"] * len(wanted))
        self._take(f'(series, level, "index") IN (VALUES {terms})', sum(wanted, ()))
        for series, level, _ in self.rows:
            self.tops[series] = max(self.tops.get(series, -1), level)
        unknown = sorted({series for series, *_ in wanted} - set(self.tops))
        if unknown:
            names = ", ".join(["%s"] * len(unknown))
            sql = f"series IN ({names}) GROUP BY series"
            self.tops |= dict(self._select("series, MAX(level)", sql, unknown))

    def of_level(self, series: str, level: int, *, load: bool = False) -> list[tuple[Place, int]]:
        """Blocks of a level and their index, in order; ``load``: those of the table as well."""
        if load:
            self._take("series = %s AND level = %s", (series, level))
        found = [place for place in self.rows if place[:2] == (series, level)]
        return sorted((place, place[2]) for place in found)

    def read(self, place: Place) -> Points:
        if place not in self.points:
            row = self.rows.get(place)
            self.points[place] = Points.unpack(row.data) if row else Points.empty()
        return self.points[place]

    def write(self, place: Place, points: Points, more: int) -> None:
        """``more``: by how many points it holds, or has beneath it, more than before."""
        self.rows.setdefault(place, _Row()).count += more
        self.points[place] = points
        self.changed.add(place)
        series, level, _ = place
        self.tops[series] = max(self.tops.get(series, -1), level)

    def save(self) -> None:
        made, kept = [], []
        for place in sorted(self.changed):
            row, data = self.rows[place], self.points[place].pack()
            if row.pk is None:
                made.append((*self._owner(), *place, row.count, data))
            else:
                kept.append((row.count, data, row.pk))
        with connection.cursor() as cursor:
            if kept:
                update = f"UPDATE {self._table} SET count = %s, data = %s WHERE id = %s"  # noqa: S608
                cursor.executemany(update, kept)
            if made:
                columns = 'run_id, replica_id, series, level, "index", count, data'
                insert = f"INSERT INTO {self._table} ({columns})"
                cursor.executemany(f"{insert} VALUES (%s, %s, %s, %s, %s, %s, %s)", made)

    @property
    def _table(self) -> str:
        return str(self.model._meta.db_table)

    def _owner(self) -> tuple[Any, Any]:
        """Run and replica as the database wants them."""
        field = self.model._meta.get_field("run")
        return field.get_db_prep_value(self.run_id, connection), self.replica_id

    def _select(self, columns: str, where: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        run_id, replica_id = self._owner()
        # "= NULL" finds nothing, and not every database looks "IS NOT DISTINCT FROM" up by index.
        mine, owner = ("= %s", [run_id, replica_id]) if replica_id else ("IS NULL", [run_id])
        select = f"SELECT {columns} FROM {self._table}"  # noqa: S608
        with connection.cursor() as cursor:
            cursor.execute(
                f"{select} WHERE run_id = %s AND replica_id {mine} AND {where}", [*owner, *values]
            )
            return list(cursor.fetchall())

    def _take(self, where: str, values: Sequence[Any]) -> None:
        """Rows of the table; one that is known already stays as it is."""
        columns = 'id, series, level, "index", count, data'
        for pk, series, level, index, count, data in self._select(columns, where, values):
            row = _Row(pk=pk, count=count, data=bytes(data))
            self.rows.setdefault((series, level, index), row)


def _over(place: Place) -> list[Place]:
    """A block of points and the roll-up blocks over it, of levels that may not exist."""
    series, _, index = place
    key = index * width(0)
    return [(series, level, key // width(level)) for level in _ALL]


def _roll_up(writer: _Writer, changes: Mapping[Place, _Change]) -> dict[Place, _Change]:
    """Bring the level above ``changes`` (of blocks of one level) up to date; what changed there."""
    done: dict[Place, _Change] = {}
    begun: set[str] = set()
    for (series, level, index), change in changes.items():
        if level == LEVELS[-1] or series in begun:
            continue
        above = _ALL[_ALL.index(level) + 1]
        if writer.tops[series] < above:
            # The coarsest level has only its first block in the table, any other is a new one.
            if any(other for _, other in writer.of_level(series, level)):
                begun.add(series)
                done |= _begin(writer, series, above)
            continue
        _put(writer, (series, level, index), change, above, done)
    return done


def _begin(writer: _Writer, series: str, level: int) -> dict[Place, _Change]:
    """Every block of a level that has none yet, from all blocks of the level below."""
    below = _ALL[_ALL.index(level) - 1]
    done: dict[Place, _Change] = {}
    for source, index in writer.of_level(series, below, load=True):
        low = index * width(below)
        count = writer.rows[source].count
        whole = _Change(count=count, low=low, high=low + width(below))
        _put(writer, source, whole, level, done)
    return done


def _put(
    writer: _Writer, source: Place, change: _Change, level: int, done: dict[Place, _Change]
) -> None:
    """Replace the buckets of a level that hold what changed in a block of the level below, which
    has all that a bucket holds or nothing of it."""
    low = change.low >> level << level
    high = -(-change.high >> level) << level
    changed = replace(change, low=low, high=high)
    series, below, index = source
    place = (series, level, index * width(below) // width(level))
    points = writer.read(source)
    part = slice(*np.searchsorted(getattr(points, writer.key), (low, high)))
    kept = keep(points.take(part), writer.key, level)
    put = put_range(writer.read(place), kept, writer.key, low, high)
    writer.write(place, put, change.count)
    done[place] = done[place] | changed if place in done else changed
