"""Reads the points of a run that a mirror has not delivered yet, as rows of a tracker.

Points are read in the order of their keys (inner step of a replica, round of the run). A relaunched
replica can repeat steps and replace their points; a tracker keeps the values of the first report.
Only points of committed rounds are read while the run is active, so this is rare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from django.db.models import Q

from diloco.trackers.base import BATCH_VALUES, TrackerRow
from runs.metrics.blocks import BLOCK_STEPS, Points, concatenate
from runs.metrics.evaluation_series import plan_part
from runs.models import MetricBlock, Replica, Run

BLOCKS_PER_SERIES = 2
"""Blocks of one series in one batch: at most 1,024 points."""

Positions = Mapping[str, int]
"""``<replica number>/<series>``, or ``/<series>`` for the run -> largest key delivered. Results of
evaluations come in any order, the metrics of one together: ``/eval-<plan>@<round>`` -> round."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows to deliver, and the positions after them."""

    rows: tuple[TrackerRow, ...]
    positions: Positions


@dataclass(frozen=True, kw_only=True)
class _Series:
    name: str
    points: Points
    is_whole: bool
    """Whether these are all points of the series up to now."""


def next_batch(run: Run, positions: Positions, *, number: int) -> Batch:
    """The next rows of one owner, the first one numbered ``number``; no rows if all are delivered.

    A batch has at most :data:`~diloco.trackers.base.BATCH_VALUES` values, or one row.
    """
    if rows := _rows_of(run, None, positions, number):
        return rows
    for replica in Replica.objects.filter(run=run).only("pk", "number", "run_id"):
        if rows := _rows_of(run, replica, positions, number):
            return rows
    return Batch(rows=(), positions=positions)


def _rows_of(run: Run, replica: Replica | None, positions: Positions, number: int) -> Batch | None:
    owner = "" if replica is None else str(replica.number)
    found = _read(run, replica, positions)
    if not found:
        return None
    key = "round" if replica is None else "step"
    by_key: dict[int, dict[str, float]] = {}
    walls: dict[int, float] = {}
    for series in found:
        keys = getattr(series.points, key).tolist()
        values, wall = series.points.value.tolist(), series.points.wall_s.tolist()
        for k, value, at in zip(keys, values, wall, strict=True):
            by_key.setdefault(k, {})[series.name] = value
            walls[k] = at
    # Rows have all series up to the first that continues in a block that was not read.
    ends = [int(getattr(s.points, key)[-1]) for s in found if not s.is_whole and len(s.points)]
    rows: list[TrackerRow] = []
    delivered, count = dict(positions), 0
    for k in sorted(by_key):
        if (ends and k > min(ends)) or (rows and count + len(by_key[k]) > BATCH_VALUES):
            break
        rows.append(
            TrackerRow(
                number=number + len(rows),
                owner=f"replica/{owner}" if owner else "",
                step=k,
                wall_s=walls[k],
                values=by_key[k],
            )
        )
        count += len(by_key[k])
        delivered |= {_position(owner, name, k): k for name in by_key[k]}
    return Batch(rows=tuple(rows), positions=delivered) if rows else None


def _position(owner: str, name: str, key: int) -> str:
    plan = plan_part(name)
    return f"{owner}/{plan}@{key}" if plan else f"{owner}/{name}"


def _read(run: Run, replica: Replica | None, positions: Positions) -> list[_Series]:
    owner = "" if replica is None else str(replica.number)
    blocks = MetricBlock.objects.filter(run=run, replica=replica, level=0)
    known = {
        name.partition("/")[2]: k for name, k in positions.items() if name.startswith(f"{owner}/")
    }
    after = Q()
    evaluated: dict[str, list[int]] = {}
    for place in [place for place in known if "@" in place]:
        evaluated.setdefault(place.partition("@")[0], []).append(known.pop(place))
    for name, k in known.items():
        after |= Q(series=name, index__gte=k // BLOCK_STEPS)
    places: dict[str, list[int]] = {}
    rows = blocks.filter(after | ~Q(series__in=list(known))).order_by("series", "index")
    for name, pk in rows.values_list("series", "pk"):
        places.setdefault(name, []).append(pk)
    # Evaluations have few points, so all of their blocks are read.
    chosen = {
        name: pks if plan_part(name) else pks[:BLOCKS_PER_SERIES] for name, pks in places.items()
    }
    wanted = [pk for pks in chosen.values() for pk in pks]
    data = dict(MetricBlock.objects.filter(pk__in=wanted).values_list("pk", "data"))
    key = "round" if replica is None else "step"
    result = []
    for name, pks in places.items():
        points = concatenate([Points.unpack(bytes(data[pk])) for pk in chosen[name]])
        is_whole = len(pks) == len(chosen[name])
        points = points.take(getattr(points, key) > known.get(name, -1))
        if done := evaluated.get(plan_part(name)):
            points = points.take(~np.isin(getattr(points, key), done))
        if not run.ended:
            # Later rounds can still change. The first of them ends the series for this batch.
            open_rounds = (points.round >= run.next_round).nonzero()[0]
            if len(open_rounds):
                points = points.take(slice(0, int(open_rounds[0])))
        if len(points):
            result.append(_Series(name=name, points=points, is_whole=is_whole))
    return result
