"""Aggregate the curves of many replicas: mean, and the band between minimum and maximum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runs.metrics.blocks import spans_at_once
from runs.metrics.charts import Axis, Curve, Scales, key_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Band:
    """Columns by bucket; NaN where no point is finite.

    ``low`` and ``high`` are the extremes of all points in a bucket; ``mean`` is the mean of each
    replica's last point in it. In the newest buckets, which not all replicas have reached, the
    value in ``newest`` counts for the others.

    Attributes:
        newest: last value of each replica that is at most ``sync_every`` steps behind the first.
    """

    x: NDArray[Any]
    low: NDArray[Any]
    mean: NDArray[Any]
    high: NDArray[Any]
    newest: dict[int, float] = field(default_factory=dict)


def band(curves: Sequence[Curve], *, axis: Axis, scales: Scales) -> Band:
    """Aggregate the curves of replicas in one window.

    The buckets are those of the coarsest curve, and at least as wide as the typical distance of two
    points: replicas report values of a segment every few steps, each at different steps.
    """
    empty = np.empty(0)
    curves = [c for c in curves if len(c.points)]
    if not curves:
        return Band(x=empty, low=empty, mean=empty, high=empty)
    level = max([_spacing_level(curves), *(c.level for c in curves)])
    runs = _Runs.of(curves, level, axis=axis, scales=scales)
    numbers, place = np.unique(runs.bucket, return_inverse=True)
    count = len(numbers)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, place, runs.low)
    np.maximum.at(high, place, runs.high)
    counted = np.isfinite(runs.last)
    known = np.bincount(place[counted], minlength=count)
    total = np.bincount(place[counted], runs.last[counted], minlength=count)
    ends = np.array([int(getattr(c.points, key_of(c.owner))[-1]) for c in curves])
    newest: dict[int, float] = {}
    for curve, end in zip(curves, ends.tolist(), strict=True):
        if curve.owner is None or end < ends.max() - scales.sync_every:
            continue
        newest[curve.owner] = one = float(curve.points.value[-1])
        if math.isfinite(one):
            after = slice(int(np.searchsorted(numbers, end >> level, side="right")), None)
            low[after], high[after] = np.minimum(low[after], one), np.maximum(high[after], one)
            known[after], total[after] = known[after] + 1, total[after] + one
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / known
    middle = np.bincount(place, runs.x, minlength=count) / np.bincount(place, minlength=count)
    low[np.isinf(low)], high[np.isinf(high)] = np.nan, np.nan
    return Band(x=middle, low=low, mean=mean, high=high, newest=newest)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Runs:
    """The points of one curve in one bucket, for each curve and bucket: their finite extremes
    (infinite if there are none), the last value, and its x."""

    bucket: NDArray[Any]
    low: NDArray[Any]
    high: NDArray[Any]
    last: NDArray[Any]
    x: NDArray[Any]

    @classmethod
    def of(cls, curves: Sequence[Curve], level: int, *, axis: Axis, scales: Scales) -> _Runs:
        """Reduce many curves, as many at once as fit a cache."""
        parts = [
            cls._of_few(curves[first:end], level, axis=axis, scales=scales)
            for first, end in spans_at_once([len(c.points) for c in curves])
        ]
        names = ("bucket", "low", "high", "last", "x")
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})

    @classmethod
    def _of_few(cls, curves: Sequence[Curve], level: int, *, axis: Axis, scales: Scales) -> _Runs:
        bucket = np.concatenate([getattr(c.points, key_of(c.owner)) for c in curves]) >> level
        value = np.concatenate([c.points.value for c in curves])
        begins = np.ones(len(bucket), dtype=bool)
        begins[1:] = bucket[1:] != bucket[:-1]
        sizes = np.array([len(c.points) for c in curves])
        begins[np.cumsum(sizes)[:-1]] = True
        starts = np.flatnonzero(begins)
        ends = np.append(starts[1:], len(bucket)) - 1
        finite = np.isfinite(value)
        x = np.concatenate([scales.x(c.points, axis, c.owner) for c in curves])
        return cls(
            bucket=bucket[starts],
            low=np.minimum.reduceat(np.where(finite, value, np.inf), starts),
            high=np.maximum.reduceat(np.where(finite, value, -np.inf), starts),
            last=value[ends],
            x=x[ends].astype(float),
        )


def _spacing_level(curves: Sequence[Curve]) -> int:
    """The level whose buckets are as wide as the median distance of two points."""
    keys = [getattr(c.points, key_of(c.owner)) for c in curves if len(c.points) > 1]
    if not keys:
        return 0
    spacing = np.median([(k[-1] - k[0]) / (len(k) - 1) for k in keys])
    return max(0, math.ceil(math.log2(spacing))) if spacing > 1 else 0
