"""Points of one series, packed many to a row of the table.

A :class:`Points` is five aligned columns: the step (the replica's inner step in the run), the round
it was taken in, tokens trained on, wall time (seconds since the epoch, for people) and the value.

Points are filed by a key, ``step`` for a replica's series and ``round`` for the run's own, into
blocks of :data:`BLOCK_STEPS` keys. **One key has one point**: a point that comes again replaces the
old one. So a replica that is relaunched and repeats steps overwrites what its former process said
about them (the newest word on a step is the one that led to the weights), curves never run
backwards, and merging the same points twice changes nothing.

**Roll-ups.** A block of level k (one of :data:`LEVELS`) holds, of each 2**k keys, the points that a
chart cannot do without: the lowest, the highest, the last, and the first that is not a number
(:func:`keep`). They are points like any other, at their own places, so a coarser level is made of
a finer one by the same function, and what is kept does not depend on how it got there. Buckets are
aligned to the keys, so they stay put while data is appended.

Layout: magic, count, then each column as little-endian raw numbers. NaN and infinities are kept as
they are; making JSON of them is :mod:`runs.metrics.columns`' business.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BLOCK_STEPS = 512
"""Keys per block: small enough to rewrite on every segment, large enough to read few rows."""

BUCKETS = 128
"""Buckets per block of a roll-up: with up to four points each, as large as a block of points."""

LEVELS = tuple(range(3, 34, 3))
"""Roll-ups that are stored, each of eight buckets of the one before; those between are made of the
finer one when they are read. A level is stored as soon as the one below has a block besides its
first, so the coarsest of a series is always a single block."""

MAX_KEY = BUCKETS * 2 ** LEVELS[-1] - 1
"""Beyond this a key is no step of any training, and its block's index would not fit the table."""

Key = Literal["step", "round"]


def width(level: int) -> int:
    """Keys per block of a level."""
    return BUCKETS << level if level else BLOCK_STEPS


_MAGIC = b"AMB1"
_HEADER = struct.Struct("<4sI")
_COLUMNS: tuple[tuple[str, str], ...] = (
    ("step", "<i8"),
    ("round", "<i4"),
    ("tokens", "<i8"),
    ("wall_s", "<f8"),
    ("value", "<f8"),
)
_POINT_BYTES = sum(np.dtype(kind).itemsize for _, kind in _COLUMNS)


class BadBlock(ValueError):
    """Bytes that are not a block of points."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Columns of one length. Not compared with ``==``: NaN is not equal to itself."""

    step: NDArray[Any]
    round: NDArray[Any]
    tokens: NDArray[Any]
    wall_s: NDArray[Any]
    value: NDArray[Any]

    @classmethod
    def of(
        cls,
        *,
        step: Sequence[int],
        round: Sequence[int],
        tokens: Sequence[int],
        wall_s: Sequence[float],
        value: Sequence[float],
    ) -> Points:
        given = {"step": step, "round": round, "tokens": tokens, "wall_s": wall_s, "value": value}
        columns = {name: np.asarray(given[name], dtype=kind) for name, kind in _COLUMNS}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"expected columns of one length, found {lengths}")
        return cls(**columns)

    @classmethod
    def empty(cls) -> Points:
        return cls.of(step=(), round=(), tokens=(), wall_s=(), value=())

    def __len__(self) -> int:
        return len(self.step)

    def take(self, index: Any) -> Points:
        """The points under a numpy index or mask."""
        return Points(**{name: getattr(self, name)[index] for name, _ in _COLUMNS})

    def pack(self) -> bytes:
        columns = (
            np.ascontiguousarray(getattr(self, name), dtype=kind).tobytes()
            for name, kind in _COLUMNS
        )
        return _HEADER.pack(_MAGIC, len(self)) + b"".join(columns)

    @classmethod
    def unpack(cls, data: bytes) -> Points:
        if len(data) < _HEADER.size:
            raise BadBlock(f"expected a header of {_HEADER.size} bytes, found {len(data)} bytes")
        magic, count = _HEADER.unpack_from(data)
        expected = _HEADER.size + count * _POINT_BYTES
        if magic != _MAGIC or len(data) != expected:
            raise BadBlock(
                f"expected {_MAGIC!r} and {expected} bytes, found {magic!r} and {len(data)}"
            )
        columns, offset = {}, _HEADER.size
        for name, kind in _COLUMNS:
            columns[name] = np.frombuffer(data, dtype=kind, count=count, offset=offset)
            offset += columns[name].nbytes
        return cls(**columns)


def concatenate(parts: Sequence[Points]) -> Points:
    if not parts:
        return Points.empty()
    return Points(
        **{name: np.concatenate([getattr(p, name) for p in parts]) for name, _ in _COLUMNS}
    )


def merge(old: Points, new: Points, key: Key) -> Points:
    """Both, sorted by ``key``; where a key comes more than once, the last of ``new`` stays."""
    both = concatenate([old, new]) if len(old) else new
    keys = getattr(both, key)
    # What is new is nearly always later than what is old, and in order.
    if (keys[1:] > keys[:-1]).all():
        return both
    # A stable sort keeps arrival order within a key, so the last of each run is the newest.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    newest = np.ones(len(order), dtype=bool)
    newest[:-1] = ordered[1:] != ordered[:-1]
    return both.take(order[newest])


def keep(points: Points, key: Key, level: int) -> Points:
    """Of each bucket of 2**level keys: the lowest, the highest, the last point and the first that
    is not finite. ``points`` are in order of ``key``; of equal values the first stays."""
    if len(points) == 0 or level == 0:
        return points
    value = points.value
    bucket = getattr(points, key) >> level
    kept = np.ones(len(points), dtype=bool)
    kept[:-1] = bucket[1:] != bucket[:-1]  # the last of each
    starts = np.concatenate([[0], np.flatnonzero(kept[:-1]) + 1])
    number = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(points)))
    finite = np.isfinite(value)
    lowest = np.minimum.reduceat(np.where(finite, value, np.inf), starts)[number]
    highest = np.maximum.reduceat(np.where(finite, value, -np.inf), starts)[number]
    for eligible in (finite & (value == lowest), finite & (value == highest), ~finite):
        found = np.flatnonzero(eligible)
        first = np.ones(len(found), dtype=bool)
        first[1:] = number[found[1:]] != number[found[:-1]]
        kept[found[first]] = True
    return points.take(kept)


def put_range(points: Points, new: Points, key: Key, low: int, high: int) -> Points:
    """``points`` with those whose key is in [low, high) replaced by ``new``."""
    keys = getattr(points, key)
    start, end = np.searchsorted(keys, (low, high))
    return concatenate([points.take(slice(0, start)), new, points.take(slice(end, None))])


def split(points: Points, key: Key, level: int = 0) -> Iterator[tuple[int, Points]]:
    """(block index, its points), one per block that ``points`` touch."""
    index = getattr(points, key) // width(level)
    if len(index) and (index == index[0]).all():
        yield int(index[0]), points
        return
    for number in np.unique(index):
        yield int(number), points.take(index == number)
