"""Points as JSON for a chart: read from blocks, thinned to what a screen can show.

Thinning keeps the lowest and the highest point of each bucket, so that a spike is never sampled
away, and the first and last point. JSON has no NaN: a value that is not finite is null, and
``nonfinite`` lists ``[index, "nan" | "inf" | "-inf"]`` so that the page can mark it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from runs.blocks import Points, concatenate
from runs.models import MetricBlock, Run

MAX_POINTS = 2000


def read_points(run: Run, series: str, *, replica: int | None, after_step: int) -> Points:
    """Points of ``series`` past ``after_step``, in order of step. One query."""
    blocks = MetricBlock.objects.filter(run=run, series=series, level=0).order_by("index")
    if replica is None:
        blocks = blocks.filter(replica=None)
    else:
        blocks = blocks.filter(replica__number=replica)
    parts = [Points.unpack(bytes(data)) for data in blocks.values_list("data", flat=True)]
    points = concatenate(parts)
    return points.take(points.step > after_step) if after_step >= 0 else points


def read_all(run: Run) -> dict[tuple[str, int | None], Points]:
    """(series, replica number or None) -> its points. One query."""
    rows = (
        MetricBlock.objects.filter(run=run, level=0)
        .order_by("series", "replica__number", "index")
        .values_list("series", "replica__number", "data")
    )
    parts: dict[tuple[str, int | None], list[Points]] = {}
    for series, replica, data in rows:
        parts.setdefault((series, replica), []).append(Points.unpack(bytes(data)))
    return {key: concatenate(found) for key, found in parts.items()}


def thin(points: Points, max_points: int) -> Points:
    """At most ``max_points`` points: first, last, and the extremes of equal buckets between."""
    count = len(points)
    if count <= max(max_points, 8):
        return points
    per_bucket = 2 if np.isfinite(points.value).all() else 3
    buckets = max((max_points - 2) // per_bucket, 1)
    edges = np.linspace(1, count - 1, buckets + 1).astype(int)
    keep = {0, count - 1}
    for start, end in itertools.pairwise(edges.tolist()):
        if start == end:
            continue
        window = points.value[start:end]
        finite = np.isfinite(window)
        if not finite.all():
            keep.add(start + int(np.argmin(finite)))  # the first that is not finite
        if finite.any():
            low = np.where(finite, window, np.inf)
            high = np.where(finite, window, -np.inf)
            keep.add(start + int(np.argmin(low)))
            keep.add(start + int(np.argmax(high)))
    return points.take(np.array(sorted(keep)))


def columns(
    points: Points, *, series: str, replica: int | None, total: int | None = None
) -> dict[str, Any]:
    """JSON-able columns; ``total`` is how many points there were before thinning."""
    value = [float(v) for v in points.value]
    return {
        "series": series,
        "replica": replica,
        "step": points.step.tolist(),
        "round": points.round.tolist(),
        "tokens": points.tokens.tolist(),
        "wall_s": [round(w, 3) for w in points.wall_s.tolist()],
        "value": [v if math.isfinite(v) else None for v in value],
        "nonfinite": [
            [i, "nan" if math.isnan(v) else "inf" if v > 0 else "-inf"]
            for i, v in enumerate(value)
            if not math.isfinite(v)
        ],
        "total": len(points) if total is None else total,
    }
