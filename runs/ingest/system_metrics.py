"""Resource usage of replicas as series: memory, CPU and GPU per segment, bytes per round.

The series are keyed by the replica's step like its losses, so the same charts draw them. A missing
figure has no point: unknown is not 0. Skipped: segments without a step (they have no place on the
step axis), rounds reported before the process's first step, and rounds of one segment that touch
more than :data:`~runs.ingest.limits.MAX_BLOCKS` blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from diloco.protocol.telemetry import RoundReport, Segment
from runs.ingest.limits import MAX_BLOCKS, finite
from runs.metrics.blocks import BLOCK_STEPS, Points, concatenate
from runs.metrics.system_series import SYSTEM_SERIES
from runs.times import is_wall_time

SHORTEST_S = 1e-6
"""Transfers reported as shorter than this have no rate."""


def usage_points(segments: Sequence[Segment]) -> dict[str, Points]:
    """The points of all segments by series name."""
    parts: dict[str, list[Points]] = {}
    for segment in segments:
        for series, points in (*_system(segment), *_transfers(segment)):
            parts.setdefault(series, []).append(points)
    return {series: concatenate(part) for series, part in parts.items()}


def _system(segment: Segment) -> Iterator[tuple[str, Points]]:
    steps = segment.steps
    if not steps.step:
        return
    for series in SYSTEM_SERIES:
        value = segment.system.get(series)
        value = finite(value)
        if value is not None and value >= 0:
            yield (
                series,
                Points.of(
                    step=steps.step[-1:],
                    round=steps.round[-1:],
                    tokens=steps.tokens[-1:],
                    wall_s=steps.wall_s[-1:],
                    value=[value],
                ),
            )


def _transfers(segment: Segment) -> Iterator[tuple[str, Points]]:
    blocks: set[int] = set()
    for report in segment.rounds:
        if report.round < 1 or not report.step or not is_wall_time(report.committed_wall_s):
            continue
        blocks.add(report.step // BLOCK_STEPS)
        if len(blocks) > MAX_BLOCKS:
            break
        for series, value in _of_round(report):
            yield (
                series,
                Points.of(
                    step=[report.step],
                    round=[report.round],
                    tokens=[report.tokens],
                    wall_s=[report.committed_wall_s],
                    value=[value],
                ),
            )


def _of_round(report: RoundReport) -> Iterator[tuple[str, float]]:
    for moved, way, phase in (
        (report.bytes_up, "up", "upload"),
        (report.bytes_down, "down", "download"),
    ):
        yield f"bytes_{way}", moved
        took_s = sum(float(p.get(phase, 0)) for p in (report.phases, report.background))
        if moved and math.isfinite(took_s) and took_s >= SHORTEST_S:
            yield f"{way}_bytes_per_s", moved / took_s
