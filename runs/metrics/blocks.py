"""Blocks of metric points: many points of one series, packed into one row of the table.

A :class:`Points` has five aligned columns: the step (inner step of the replica in the run), the
round, tokens trained on, wall time (seconds since the epoch, for display) and the value.

Points are stored by a key (``step`` for a series of a replica, ``round`` for a series of the run)
in blocks of :data:`BLOCK_STEPS` keys. **One key has one point**: a new point replaces an old one. A
relaunched replica that repeats steps therefore overwrites the points of its previous process (the
latest attempt at a step is the one that led to the weights), curves never run backwards, and
merging points twice changes nothing.

**Downsampling.** A block of level k (one of :data:`LEVELS`) contains for each bucket of 2**k keys
the points that a chart needs: the minimum, the maximum, the last, and the first that is not finite
(:func:`keep`). They are points with unchanged keys, so a coarser level is computed from a finer one
by the same function, and the result does not depend on the order of writes. Buckets are aligned to
the keys, so they do not move while data is appended.

Layout: magic, count, then each column as raw little-endian numbers. NaN and infinities are stored
as such; :meth:`Points.to_json` converts them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BLOCK_STEPS = 512
"""Keys per block: few enough to rewrite on every segment, many enough to read few rows."""

BUCKETS = 128
"""Buckets per downsampled block: with up to four points each, it is as large as other blocks."""

LEVELS = (5, 10)
"""Stored levels: buckets of 32 and of 1,024 keys. Other levels are computed when they are read, so
a reader gets at most 32 times the buckets that it needs. A million points have a thousand buckets
of the coarsest level."""

MAX_KEY = BLOCK_STEPS * 2**31 - 1
"""Largest key: no training has more steps, and the index of its block would not fit the table."""

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
    """The bytes are no block of points."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Columns of equal length. Not comparable with ``==``, because NaN is not equal to itself."""

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
        """Build from sequences. Raises ``ValueError`` if their lengths differ."""
        values = {"step": step, "round": round, "tokens": tokens, "wall_s": wall_s, "value": value}
        columns = {name: np.asarray(values[name], dtype=kind) for name, kind in _COLUMNS}
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
        """The points selected by a NumPy index or mask."""
        return Points(**{name: getattr(self, name)[index] for name, _ in _COLUMNS})

    def to_json(
        self, *, series: str, replica: int | None, total: int | None = None
    ) -> dict[str, Any]:
        """The columns of a series for JSON. ``total`` is the number of points before downsampling.

        JSON has no NaN: a value that is not finite becomes null, and ``nonfinite`` lists it.
        """
        value = self.value.tolist()
        return {
            "series": series,
            "replica": replica,
            "step": self.step.tolist(),
            "round": self.round.tolist(),
            "tokens": self.tokens.tolist(),
            "wall_s": [round(w, 3) for w in self.wall_s.tolist()],
            "value": [v if math.isfinite(v) else None for v in value],
            "nonfinite": nonfinite(value),
            "total": len(self) if total is None else total,
        }

    def pack(self) -> bytes:
        """Serialize as the data of a block."""
        columns = (
            np.ascontiguousarray(getattr(self, name), dtype=kind).tobytes()
            for name, kind in _COLUMNS
        )
        return _HEADER.pack(_MAGIC, len(self)) + b"".join(columns)

    @classmethod
    def unpack(cls, data: bytes) -> Points:
        """Parse the data of a block. Raises :class:`BadBlock`."""
        return unpack_all([data])[0]


def nonfinite(value: Sequence[float]) -> list[list[Any]]:
    """``[index, "nan" | "inf" | "-inf"]`` of each value that is not finite, so that a page can mark
    it."""
    return [
        [i, "nan" if math.isnan(v) else "inf" if v > 0 else "-inf"]
        for i, v in enumerate(value)
        if not math.isfinite(v)
    ]


def unpack_all(blocks: Sequence[bytes]) -> tuple[Points, list[int]]:
    """Parse the data of many blocks, joined in the given order, and the number of points of each.

    It joins bytes, column by column, which is several times as fast as an array per block. Raises
    :class:`BadBlock`.
    """
    counts = [_count(data) for data in blocks]
    views = [memoryview(data) for data in blocks]  # its slices are no copies
    columns, before = {}, 0
    for name, kind in _COLUMNS:
        size = np.dtype(kind).itemsize
        column = b"".join(
            [
                view[_HEADER.size + count * before : _HEADER.size + count * (before + size)]
                for view, count in zip(views, counts, strict=True)
            ]
        )
        columns[name] = np.frombuffer(column, dtype=kind)
        before += size
    return Points(**columns), counts


def _count(data: bytes) -> int:
    """The number of points of a block. Raises :class:`BadBlock`."""
    if len(data) < _HEADER.size:
        raise BadBlock(f"expected a header of {_HEADER.size} bytes, found {len(data)} bytes")
    magic, count = _HEADER.unpack_from(data)
    expected = _HEADER.size + count * _POINT_BYTES
    if magic != _MAGIC or len(data) != expected:
        raise BadBlock(f"expected {_MAGIC!r} and {expected} bytes, found {magic!r} and {len(data)}")
    return int(count)


def concatenate(parts: Sequence[Points]) -> Points:
    """Join points in the given order."""
    if not parts:
        return Points.empty()
    if len(parts) == 1:
        return parts[0]
    return Points(
        **{name: np.concatenate([getattr(p, name) for p in parts]) for name, _ in _COLUMNS}
    )


def merge(old: Points, new: Points, key: Key) -> Points:
    """Merge points by ``key``; of several points with one key, the last of ``new`` remains."""
    both = concatenate([old, new]) if len(old) else new
    keys = getattr(both, key)
    # New points are nearly always in order and later than the old ones.
    if (keys[1:] > keys[:-1]).all():
        return both
    # A stable sort keeps the order of arrival within a key, so the last one is the newest.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    newest = np.ones(len(order), dtype=bool)
    newest[:-1] = ordered[1:] != ordered[:-1]
    return both.take(order[newest])


def keep(points: Points, key: Key, level: int) -> Points:
    """Keep the minimum, maximum, last and first non-finite point of each bucket of 2**level keys.

    ``points`` are sorted by ``key``. The first of equal extremes remains.
    """
    return keep_each([points], key, level)[0]


AT_ONCE = 1 << 15
"""Points that are downsampled together: many series, and their arrays still fit a cache."""


def keep_each(parts: Sequence[Points], key: Key, level: int) -> list[Points]:
    """:func:`keep` of each series, several at once: a call per series costs more than its
    points."""
    if level == 0:
        return list(parts)
    return [
        kept
        for first, last in spans_at_once([len(part) for part in parts])
        for kept in _keep_together(parts[first:last], key, level)
    ]


def spans_at_once(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divide series with these numbers of points into (first, last + 1) of at most
    :data:`AT_ONCE` points together, or of one series."""
    first, size = 0, 0
    for place, more in enumerate(sizes):
        if place > first and size + more > AT_ONCE:
            yield first, place
            first, size = place, 0
        size += more
    if sizes:
        yield first, len(sizes)


def _keep_together(parts: Sequence[Points], key: Key, level: int) -> list[Points]:
    points = concatenate(parts)
    if len(points) == 0:
        return list(parts)
    value = points.value
    bucket = getattr(points, key) >> level
    kept = np.ones(len(points), dtype=bool)
    kept[:-1] = bucket[1:] != bucket[:-1]  # the last of each
    ends = np.cumsum([len(part) for part in parts])
    kept[ends[ends > 0] - 1] = True
    starts = np.concatenate([[0], np.flatnonzero(kept[:-1]) + 1])
    sizes = np.diff(starts, append=len(points))
    number = np.repeat(np.arange(len(starts)), sizes)
    finite = np.isfinite(value)
    whole = finite.all()
    lows = value if whole else np.where(finite, value, np.inf)
    highs = value if whole else np.where(finite, value, -np.inf)
    lowest = np.repeat(np.minimum.reduceat(lows, starts), sizes)
    highest = np.repeat(np.maximum.reduceat(highs, starts), sizes)
    for eligible in (finite & (value == lowest), finite & (value == highest), ~finite):
        index = np.flatnonzero(eligible)
        first = np.ones(len(index), dtype=bool)
        first[1:] = number[index[1:]] != number[index[:-1]]
        kept[index[first]] = True
    index = np.flatnonzero(kept)
    counts = np.diff(np.searchsorted(index, ends), prepend=0).tolist()
    return slices(points.take(index), counts)


def slices(points: Points, counts: Iterable[int]) -> list[Points]:
    """Divide joined points into parts of these lengths, without copying."""
    result, first = [], 0
    for count in counts:
        result.append(points.take(slice(first, first + count)))
        first += count
    return result


def thin(points: Points, key: Key, most: int, level: int = 0) -> tuple[Points, int]:
    """The points that :func:`keep` leaves, and their level: the first from ``level`` on that has
    at most ``most``."""
    return thin_each([points], key, most, level)[0]


def thin_each(
    parts: Sequence[Points], key: Key, most: int, level: int = 0
) -> list[tuple[Points, int]]:
    """:func:`thin` of each series."""
    result = []
    for kept in keep_each(parts, key, level):
        coarser = level
        while len(kept) > max(most, 4):
            coarser += 1
            kept = keep(kept, key, coarser)
        result.append((kept, coarser))
    return result


def put_range(points: Points, new: Points, key: Key, low: int, high: int) -> Points:
    """Replace the points with keys in [low, high) by ``new``."""
    keys = getattr(points, key)
    start, end = np.searchsorted(keys, (low, high))
    return concatenate([points.take(slice(0, start)), new, points.take(slice(end, None))])


def split(points: Points, key: Key, level: int = 0) -> Iterator[tuple[int, Points]]:
    """Split points into blocks: (block index, points)."""
    index = getattr(points, key) // width(level)
    if len(index) and (index == index[0]).all():
        yield int(index[0]), points
        return
    for number in np.unique(index):
        yield int(number), points.take(index == number)
