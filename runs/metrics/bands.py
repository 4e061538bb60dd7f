"""Many replicas' curves as one: their mean and the band between the lowest and the highest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runs.metrics.charts import Axis, Curve, Scales, key_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Band:
    """Columns by bucket. ``low`` and ``high`` are extremes of all points, ``mean`` is that of the
    replicas' last ones; NaN where nothing is finite."""

    x: NDArray[Any]
    low: NDArray[Any]
    mean: NDArray[Any]
    high: NDArray[Any]


def band(curves: Sequence[Curve], *, axis: Axis, scales: Scales) -> Band:
    """Of replicas' curves of one window, whose buckets are the same: those of the coarsest, and no
    finer than the points are apart. (Figures of a segment come every so many steps, of each replica
    at others.)"""
    empty = np.empty(0)
    found = [c for c in curves if len(c.points)]
    if not found:
        return Band(x=empty, low=empty, mean=empty, high=empty)
    level = max([_apart(found), *(c.level for c in found)])
    bucket = np.concatenate([getattr(c.points, key_of(c.owner)) >> level for c in found])
    value = np.concatenate([c.points.value for c in found])
    x = np.concatenate([scales.x(c.points, axis, c.owner) for c in found]).astype(float)
    owner = np.repeat(np.arange(len(found)), [len(c.points) for c in found])
    last = np.append((bucket[1:] != bucket[:-1]) | (owner[1:] != owner[:-1]), True)
    numbers, place = np.unique(bucket, return_inverse=True)
    count = len(numbers)
    finite = np.isfinite(value)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, place[finite], value[finite])
    np.maximum.at(high, place[finite], value[finite])
    counted = last & finite
    known = np.bincount(place[counted], minlength=count)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(place[counted], value[counted], minlength=count) / known
    middle = np.bincount(place[last], x[last], minlength=count) / np.bincount(
        place[last], minlength=count
    )
    low[np.isinf(low)], high[np.isinf(high)] = np.nan, np.nan
    return Band(x=middle, low=low, mean=mean, high=high)


def _apart(curves: Sequence[Curve]) -> int:
    """The level whose buckets are as wide as points of a typical curve are apart."""
    keys = [getattr(c.points, key_of(c.owner)) for c in curves if len(c.points) > 1]
    if not keys:
        return 0
    apart = np.median([(k[-1] - k[0]) / (len(k) - 1) for k in keys])
    return max(0, math.ceil(math.log2(apart))) if apart > 1 else 0
