"""The band of many replicas is the same before and after downsampling, in parts of any size."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import numpy as np
import pytest

from runs.metrics import blocks, charts
from runs.metrics.bands import band
from runs.metrics.blocks import Points
from runs.metrics.charts import Curve, Scales

LEVEL = 4


def curves(seed: int) -> list[Curve]:
    """Seven replicas with gaps, and values that are not finite."""
    chance = random.Random(seed)
    result = []
    for owner in range(7):
        steps = sorted(chance.sample(range(1000), chance.randint(1, 600)))
        values = [
            chance.choice([math.nan, math.inf]) if chance.random() < 0.1 else chance.gauss(3, 1)
            for _ in steps
        ]
        points = Points.of(
            step=steps, round=steps, tokens=steps, wall_s=[1e9 + s for s in steps], value=values
        )
        result.append(Curve(series="loss", owner=owner, points=points, total=600, level=LEVEL))
    return result


def columns(of: list[Curve]) -> list[list[float]]:
    found = band(of, axis="wall", scales=Scales(sync_every=50))
    return [found.x.tolist(), found.low.tolist(), found.high.tolist(), found.mean.tolist()]


@pytest.mark.parametrize("at_once", [1, 500, 1 << 15])
def test_extremes_are_of_all_points_and_the_mean_of_the_last(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(blocks, "AT_ONCE", at_once)
    given = curves(1)
    found = band(given, axis="step", scales=Scales(sync_every=1))
    points, lasts = defaultdict(list), defaultdict(list)
    for curve in given:
        by_bucket: dict[int, list[float]] = defaultdict(list)
        for step, value in zip(
            curve.points.step.tolist(), curve.points.value.tolist(), strict=True
        ):
            by_bucket[step >> LEVEL].append(value)
        for bucket, values in by_bucket.items():
            points[bucket] += [v for v in values if math.isfinite(v)]
            lasts[bucket] += [v for v in values[-1:] if math.isfinite(v)]
    newest = max(int(c.points.step[-1]) for c in given) >> LEVEL
    for place, bucket in enumerate(sorted(points)):
        if bucket >= newest - 1:
            continue  # the newest value of a replica that is behind counts there
        expected = [min(points[bucket], default=math.nan), max(points[bucket], default=math.nan)]
        mean = np.mean(lasts[bucket]) if lasts[bucket] else math.nan
        assert [found.low[place], found.high[place]] == pytest.approx(expected, nan_ok=True)
        assert found.mean[place] == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize("seed", range(5))
def test_a_band_of_downsampled_curves_is_the_same(seed: int) -> None:
    stored = curves(seed)
    downsampled = charts.downsample(stored, 600)
    assert sum(len(c.points) for c in downsampled) < sum(len(c.points) for c in stored)
    assert str(columns(downsampled)) == str(columns(stored))


def test_each_replica_counts_in_a_bucket_that_all_share() -> None:
    points = [
        Points.of(step=[1], round=[1], tokens=[1], wall_s=[1.0], value=[float(owner)])
        for owner in range(3)
    ]
    given = [
        Curve(series="loss", owner=owner, points=one, total=1, level=LEVEL)
        for owner, one in enumerate(points)
    ]
    found = band(given, axis="step", scales=Scales())
    assert (found.low.tolist(), found.mean.tolist(), found.high.tolist()) == ([0.0], [1.0], [2.0])
