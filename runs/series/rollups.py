"""Points into the tables: their own blocks, and the roll-ups above them, in one transaction.

A block of points that changes replaces its range in the roll-up above, that one its range in the
next: a few rows per series whatever its length, and the same rows whether points came one by one,
all at once, twice or late. ``count`` of a roll-up is how many points lie beneath it.

A level exists as soon as the one below has a block besides its first. When it begins, and only
then, it is made from all that lies below (:func:`_begin`); series that are older than the roll-ups
get theirs in the same way (:func:`build`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Max, Q

from runs.models import MetricBlock
from runs.series.blocks import LEVELS, Key, Points, keep, merge, put_range, split, width

Place = tuple[str, int, int]
"""Series, level, index."""

_ALL = (0, *LEVELS)


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
    added: dict[Place, int] = {}
    for place, part in sorted(parts.items(), key=lambda item: item[0]):
        before = writer.read(place)
        newest[place[0]] = writer.write(place, merge(before, part, key))
        added[place] = len(newest[place[0]]) - len(before)
        writer.rows[place].count = len(newest[place[0]])
    while added:
        added = _roll_up(writer, added)
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
class _Writer:
    """Rows of one owner (a replica, or the run itself): read in one query, written in two."""

    run_id: Any
    replica_id: Any
    key: Key
    model: Any = MetricBlock
    rows: dict[Place, Any] = field(default_factory=dict)
    points: dict[Place, Points] = field(default_factory=dict)
    changed: set[Place] = field(default_factory=set)
    stored: dict[tuple[str, int], int] | None = None

    def load(self, places: Iterable[Place]) -> None:
        """In one query; run and replica are in each term so that each is a look-up by index."""
        wanted: dict[tuple[int, int], set[str]] = {}
        for series, level, index in places:
            wanted.setdefault((level, index), set()).add(series)
        terms = Q()
        for (level, index), names in wanted.items():
            terms |= self._mine(level=level, index=index, series__in=sorted(names))
        if wanted:
            self._take(self.model.objects.filter(terms))

    def _mine(self, **more: Any) -> Q:
        return Q(run_id=self.run_id, replica_id=self.replica_id, **more)

    def _take(self, rows: Iterable[Any]) -> None:
        for row in rows:
            self.rows.setdefault((row.series, row.level, row.index), row)

    def of_level(self, series: str, level: int, *, load: bool = False) -> list[tuple[Place, int]]:
        """Blocks of a level and their index, in order; ``load``: those of the table as well."""
        if load:
            self._take(self.model.objects.filter(self._mine(series=series, level=level)))
        found = [place for place in self.rows if place[:2] == (series, level)]
        return sorted((place, place[2]) for place in found)

    def last_index(self, series: str, level: int) -> int:
        """The last block of a level, -1 if it has none."""
        if self.stored is None:
            rows = self.model.objects.filter(self._mine()).order_by()
            found = rows.values_list("series", "level").annotate(last=Max("index"))
            self.stored = {(name, at): last for name, at, last in found}
        mine = [index for _, index in self.of_level(series, level)]
        return max([self.stored.get((series, level), -1), *mine])

    def read(self, place: Place) -> Points:
        if place not in self.points:
            row = self.rows.get(place)
            self.points[place] = Points.unpack(bytes(row.data)) if row else Points.empty()
        return self.points[place]

    def write(self, place: Place, points: Points) -> Points:
        if place not in self.rows:
            series, level, index = place
            owner = {"run_id": self.run_id, "replica_id": self.replica_id}
            self.rows[place] = self.model(**owner, series=series, level=level, index=index)
        self.points[place] = points
        self.changed.add(place)
        return points

    def save(self) -> None:
        rows = [self.rows[place] for place in sorted(self.changed)]
        for row in rows:
            row.data = self.points[(row.series, row.level, row.index)].pack()
        self.model.objects.bulk_update([r for r in rows if r.pk], ["data", "count"])
        self.model.objects.bulk_create([r for r in rows if not r.pk])


def _over(place: Place) -> list[Place]:
    """A block of points and the roll-up blocks over it, of levels that may not exist."""
    series, _, index = place
    key = index * width(0)
    return [(series, level, key // width(level)) for level in _ALL]


def _roll_up(writer: _Writer, added: Mapping[Place, int]) -> dict[Place, int]:
    """Bring the level above ``added`` (blocks of one level that changed, and by how many points)
    up to date; its changed blocks, in the same way."""
    done: dict[Place, int] = {}
    begun: set[str] = set()
    for (series, level, index), count in added.items():
        if level == LEVELS[-1] or series in begun:
            continue
        above = _ALL[_ALL.index(level) + 1]
        place = (series, above, index * width(level) // width(above))
        if place not in writer.rows and writer.last_index(series, above) < 0:
            if writer.last_index(series, level) > 0:
                begun.add(series)
                done |= _begin(writer, series, above)
            continue
        _put(writer, (series, level, index), place, count)
        done[place] = done.get(place, 0) + count
    return done


def _begin(writer: _Writer, series: str, level: int) -> dict[Place, int]:
    """Every block of a level that has none yet, from all blocks of the level below."""
    below = _ALL[_ALL.index(level) - 1]
    done: dict[Place, int] = {}
    for source, index in writer.of_level(series, below, load=True):
        place = (series, level, index * width(below) // width(level))
        count = writer.rows[source].count
        _put(writer, source, place, count)
        done[place] = done.get(place, 0) + count
    return done


def _put(writer: _Writer, source: Place, place: Place, count: int) -> None:
    """Replace what a roll-up block holds of one block below it."""
    _, level, index = source
    low = index * width(level)
    kept = keep(writer.read(source), writer.key, place[1])
    writer.write(place, put_range(writer.read(place), kept, writer.key, low, low + width(level)))
    writer.rows[place].count += count
