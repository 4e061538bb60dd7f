"""Points into the tables: their own blocks, and the roll-ups above them, in one transaction.

A block of points that changes replaces its buckets in the roll-up above, that one its own in the
next: a few rows per series whatever its length, and the same rows whether points came one by one,
all at once, twice or late. ``count`` of a roll-up is how many points lie beneath it.

A level exists as soon as the one below has a block besides its first. When it begins, and only
then, it is made from all that lies below (:func:`_begin`); series that are older than the roll-ups
get theirs in the same way (:func:`build`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from runs.metrics.block_store import BlockRow, BlockRows, Owner, Place, Series
from runs.metrics.blocks import LEVELS, Key, Points, keep, merge, put_range, split, width
from runs.models import MetricBlock

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
    owner = _id(replica)
    return add_of_many(run, {owner: new}, key=key, model=model)[owner]


def add_of_many(
    run: Any, new: Mapping[Owner, Mapping[str, Points]], *, key: Key, model: Any = MetricBlock
) -> dict[Owner, dict[str, Points]]:
    """The same for several replicas, by their ids, in as many statements as for one."""
    parts = {
        (owner, series, 0, index): part
        for owner, mine in new.items()
        for series, points in mine.items()
        for index, part in split(points, key)
    }
    writer = _Writer(BlockRows(_id(run), model), key)
    writer.find(parts)
    newest: dict[Owner, dict[str, Points]] = {owner: {} for owner in new}
    changes: dict[Place, _Change] = {}
    for place, part in sorted(parts.items(), key=lambda item: item[0][3]):
        owner, series, _, _ = place
        before = writer.read(place)
        merged = newest[owner][series] = merge(before, part, key)
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
    writer = _Writer(BlockRows(_id(run), model), key)
    mine = (_id(replica), series)
    for below, level in zip(_ALL, LEVELS, strict=False):
        writer.rows.find_level(mine, below)
        if not any(index for *_, index in writer.rows.of_level(mine, below)):
            break
        _begin(writer, mine, level)
    writer.save()


def _id(row: Any) -> Any:
    return getattr(row, "pk", row)


@dataclass
class _Writer:
    """Blocks that are read, changed in memory and written at the end."""

    rows: BlockRows
    key: Key
    points: dict[Place, Points] = field(default_factory=dict)
    changed: dict[Place, None] = field(default_factory=dict)
    tops: dict[Series, int] = field(default_factory=dict)
    """The coarsest level of each series."""

    def find(self, places: Mapping[Place, Any]) -> None:
        """Blocks of points, and the roll-ups over them.

        A series that has a row among these has its single coarsest block among them, so which level
        that is need not be asked for; of the others (new ones, mostly) it is."""
        self.rows.find({above for place in places for above in _over(place)})
        for owner, series, level, _ in self.rows.known:
            self.tops[owner, series] = max(self.tops.get((owner, series), -1), level)
        unknown = {place[:2] for place in places} - set(self.tops)
        if unknown:
            self.tops |= self.rows.coarsest(unknown)

    def read(self, place: Place) -> Points:
        if place not in self.points:
            row = self.rows.known.get(place)
            self.points[place] = Points.unpack(row.data) if row else Points.empty()
        return self.points[place]

    def write(self, place: Place, points: Points, more: int) -> None:
        """``more``: by how many points it holds, or has beneath it, more than before."""
        self.rows.known.setdefault(place, BlockRow()).count += more
        self.points[place] = points
        self.changed[place] = None
        owner, series, level, _ = place
        self.tops[owner, series] = max(self.tops.get((owner, series), -1), level)

    def save(self) -> None:
        self.rows.save((place, self.points[place].pack()) for place in self.changed)


def _over(place: Place) -> list[Place]:
    """A block of points and the roll-up blocks over it, of levels that may not exist."""
    owner, series, _, index = place
    key = index * width(0)
    return [(owner, series, level, key // width(level)) for level in _ALL]


def _roll_up(writer: _Writer, changes: Mapping[Place, _Change]) -> dict[Place, _Change]:
    """Bring the level above ``changes`` (of blocks of one level) up to date; what changed there."""
    done: dict[Place, _Change] = {}
    begun: set[Series] = set()
    # The coarsest level has only its first block in the table, any other of it is a new one.
    second = {place[:2] for place in changes if place[3] > 0}
    for place, change in changes.items():
        owner, series, level, _ = place
        mine = (owner, series)
        if level == LEVELS[-1] or mine in begun:
            continue
        above = _ALL[_ALL.index(level) + 1]
        if writer.tops[mine] >= above:
            _put(writer, place, change, above, done)
        elif mine in second:
            begun.add(mine)
            done |= _begin(writer, mine, above)
    return done


def _begin(writer: _Writer, series: Series, level: int) -> dict[Place, _Change]:
    """Every block of a level that has none yet, from all blocks of the level below."""
    below = _ALL[_ALL.index(level) - 1]
    done: dict[Place, _Change] = {}
    writer.rows.find_level(series, below)
    for place in writer.rows.of_level(series, below):
        low = place[3] * width(below)
        count = writer.rows.known[place].count
        _put(writer, place, _Change(count=count, low=low, high=low + width(below)), level, done)
    return done


def _put(
    writer: _Writer, source: Place, change: _Change, level: int, done: dict[Place, _Change]
) -> None:
    """Replace the buckets of a level that hold what changed in a block of the level below; a block
    has all keys of such a bucket or none of them."""
    low = change.low >> level << level
    high = -(-change.high >> level) << level
    changed = replace(change, low=low, high=high)
    owner, series, below, index = source
    place = (owner, series, level, index * width(below) // width(level))
    points = writer.read(source)
    part = slice(*np.searchsorted(getattr(points, writer.key), (low, high)))
    kept = keep(points.take(part), writer.key, level)
    put = put_range(writer.read(place), kept, writer.key, low, high)
    writer.write(place, put, change.count)
    done[place] = done[place] | changed if place in done else changed
