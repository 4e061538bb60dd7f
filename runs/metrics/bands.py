"""Aggregate the curves of many replicas: mean, and the band between minimum and maximum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    bucket = np.concatenate([getattr(c.points, key_of(c.owner)) >> level for c in curves])
    value = np.concatenate([c.points.value for c in curves])
    x = np.concatenate([scales.x(c.points, axis, c.owner) for c in curves]).astype(float)
    owner = np.repeat(np.arange(len(curves)), [len(c.points) for c in curves])
    last = np.append((bucket[1:] != bucket[:-1]) | (owner[1:] != owner[:-1]), True)
    numbers, place = np.unique(bucket, return_inverse=True)
    count = len(numbers)
    finite = np.isfinite(value)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, place[finite], value[finite])
    np.maximum.at(high, place[finite], value[finite])
    counted = last & finite
    known = np.bincount(place[counted], minlength=count)
    total = np.bincount(place[counted], value[counted], minlength=count)
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
    middle = np.bincount(place[last], x[last], minlength=count) / np.bincount(
        place[last], minlength=count
    )
    low[np.isinf(low)], high[np.isinf(high)] = np.nan, np.nan
    return Band(x=middle, low=low, mean=mean, high=high, newest=newest)


def _spacing_level(curves: Sequence[Curve]) -> int:
    """The level whose buckets are as wide as the median distance of two points."""
    keys = [getattr(c.points, key_of(c.owner)) for c in curves if len(c.points) > 1]
    if not keys:
        return 0
    spacing = np.median([(k[-1] - k[0]) / (len(k) - 1) for k in keys])
    return max(0, math.ceil(math.log2(spacing))) if spacing > 1 else 0
