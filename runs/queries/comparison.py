"""Compare runs: results, effort, curves, and the settings in which they differ.

The first run is the baseline. Every function makes a constant number of queries, whatever the
number of runs (at most :data:`MOST`) and of their rounds. Unknown values are None. A cost is known
only if the price of every pool is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, islice
from typing import Any

import numpy as np
from django.db.models import Min
from django.utils import timezone
from numpy.typing import NDArray

from diloco.protocol.settings import setting_fields
from runs.json_values import finite, least, mapping
from runs.metrics.blocks import Points, concatenate, thin
from runs.metrics.round_strips import GROUPS
from runs.models import MetricBlock, ReplicaAttempt, Round, Run
from runs.queries.selectors import goodput

MOST = 20
CURVE_POINTS = 1000
"""Points per curve, including its extremes."""
ROWS = 5000
BLOCKS = 200
"""Blocks that are read at once."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A row of the comparison.

    ``better`` is "lower", "higher" or ''. ``unit`` selects the format on pages.
    """

    name: str
    label: str
    unit: str
    better: str = ""
    help: str = ""


MEASURES = (
    Measure(name="eval_loss", label="Final eval loss", unit="loss", better="lower"),
    Measure(name="best_eval_loss", label="Best eval loss", unit="loss", better="lower"),
    Measure(name="train_loss", label="Final train loss", unit="loss", better="lower"),
    Measure(
        name="best_train_loss",
        label="Best train loss",
        unit="loss",
        better="lower",
        help="Lowest mean of a round",
    ),
    Measure(name="tokens", label="Tokens", unit="count"),
    Measure(
        name="wall_s",
        label="Wall time",
        unit="duration",
        better="lower",
        help="Since the first step",
    ),
    Measure(
        name="tokens_per_s",
        label="Tokens/s",
        unit="count",
        better="higher",
        help="Tokens divided by wall time",
    ),
    Measure(
        name="goodput",
        label="Goodput",
        unit="percent",
        better="higher",
        help="Compute time divided by the time of all phases of all rounds",
    ),
    Measure(
        name="bytes",
        label="Traffic",
        unit="size",
        better="lower",
        help="Uploads and downloads of all replicas",
    ),
    Measure(name="cost_usd", label="Cost", unit="money", better="lower"),
    Measure(
        name="usd_per_billion_tokens",
        label="Cost per billion tokens",
        unit="money",
        better="lower",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value of a run.

    Attributes:
        change: difference to the baseline.
        share: ``change`` divided by the baseline.
        good: whether the value is better than the baseline; None if neither.
    """

    value: float | None
    change: float | None = None
    share: float | None = None
    good: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting in which runs differ, with one value per run."""

    name: str
    label: str
    values: tuple[Any, ...]
    same: tuple[bool, ...]
    """Whether each value equals that of the baseline, the first run."""


def measured(runs: Sequence[Run]) -> list[dict[str, float | None]]:
    """Values of :data:`MEASURES` for each run from :func:`runs.queries.selectors.runs_for`."""
    now = timezone.now()
    best = {
        run: (eval_loss, loss)
        for run, eval_loss, loss in Round.objects.filter(run__in=runs)
        .order_by()
        .values("run")
        .annotate(best_eval=Min("eval_loss"), best_loss=Min("loss"))
        .values_list("run", "best_eval", "best_loss")
    }
    return [_measures(run, best.get(run.pk, (None, None)), now) for run in runs]


def _measures(
    run: Run, best: tuple[float | None, float | None], now: datetime
) -> dict[str, float | None]:
    # Without tokens nothing is measured yet: less traffic than another run is no merit.
    begun = run.first_step_at
    wall_s = ((run.ended_at or now) - begun).total_seconds() if begun else None
    cost = None if getattr(run, "unpriced", True) else finite(run.cost_usd)
    return {
        "eval_loss": finite(run.eval_loss),
        "best_eval_loss": least(best[0], run.eval_loss),
        "train_loss": finite(run.train_loss),
        "best_train_loss": finite(best[1]),
        "tokens": run.tokens or None,
        "wall_s": wall_s,
        "tokens_per_s": run.tokens / wall_s if wall_s and run.tokens else None,
        "goodput": goodput(run.phase_s),
        "bytes": (run.bytes_up + run.bytes_down) if run.tokens else None,
        "cost_usd": cost,
        "usd_per_billion_tokens": cost / run.tokens * 1e9
        if cost is not None and run.tokens
        else None,
    }


def table(measures: Sequence[Mapping[str, float | None]]) -> list[list[Cell]]:
    """One row of cells per run, in the order of :data:`MEASURES`. The first run is the baseline."""
    base = measures[0] if measures else {}
    return [
        [
            Cell(value=row[m.name]) if place == 0 else _cell(m, row[m.name], base[m.name])
            for m in MEASURES
        ]
        for place, row in enumerate(measures)
    ]


def _cell(measure: Measure, value: float | None, base: float | None) -> Cell:
    if value is None or base is None:
        return Cell(value=value)
    change = value - base
    good = None
    if measure.better and change:
        good = (change < 0) == (measure.better == "lower")
    return Cell(value=value, change=change, share=change / base if base else None, good=good)


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Settings, workload fields, pools and limits in which runs differ.

    Makes no query for runs whose pools were prefetched.
    """
    labels = {spec.name: spec.label for spec in setting_fields()}
    documents = [_document(run) for run in runs]
    names = dict.fromkeys(name for document in documents for name in document)
    result = []
    for name in names:
        values = tuple(document.get(name) for document in documents)
        if any(value != values[0] for value in values):
            result.append(
                Difference(
                    name=name,
                    label=labels.get(name.removeprefix("settings."), name.replace("_", " ")),
                    values=values,
                    same=tuple(value == values[0] for value in values),
                )
            )
    return result


def _document(run: Run) -> dict[str, Any]:
    """The configuration of a run as a flat mapping, in display order."""
    pools = [
        f"{pool.count} × {pool.backend} {pool.hardware}{' spot' if pool.spot else ''}"
        f"{f' in {pool.region}' if pool.region else ''}"
        for pool in run.pools.all()
    ]
    return {
        **{f"settings.{name}": value for name, value in mapping(run.group_settings).items()},
        **{f"workload.{name}": value for name, value in mapping(run.workload).items()},
        "pools": ", ".join(pools),
        "time_limit_s": run.time_limit_s,
        "budget_usd": run.budget_usd,
        "max_restarts": run.max_restarts,
        "code": run.code_sha256,
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """One curve of one run. ``usd`` is None if a price is unknown."""

    run: str
    series: str
    tokens: NDArray[Any]
    wall_s: NDArray[Any]
    usd: NDArray[Any] | None
    value: NDArray[Any]
    total: int


_Thinned = tuple[Points, int]
"""Points of a curve after downsampling, and their number before."""


METRICS = {
    "eval_loss": "Evaluation loss",
    "loss": "Training loss",
    "norm": "Norm of the pseudo-gradients",
    "cosine": "Cosine to the mean pseudo-gradient",
    "update_norm": "Norm of the outer update",
    "tokens_per_s": "Tokens per second",
    "goodput": "Goodput",
    "contributors": "Replicas in the round",
}
"""Metrics of curves. The series of evaluation results (:mod:`runs.metrics.evaluation_series`) are
others."""
LOSSES = ("eval_loss", "loss")


def curves(runs: Sequence[Run], metrics: Sequence[str] = LOSSES) -> list[Curve]:
    """Curves of metrics, by round: by default evaluation loss of the global weights and mean
    training loss.

    The x-axes are tokens of all replicas, seconds since the first step, and cost.
    """
    stored = [name for name in metrics if name not in (*_OF_ROUNDS, "goodput")]
    points = _stored(runs, stored)
    for name in (name for name in metrics if name in _OF_ROUNDS):
        points |= _rounds(runs, name)
    if "goodput" in metrics:
        points |= _goodput(runs)
    spent = _spending(runs)
    return [
        _curve(run, series, points[run.pk, series], spent.get(run.pk, ()))
        for run in runs
        for series in metrics
        if (run.pk, series) in points
    ]


_OF_ROUNDS = ("loss", "contributors")
"""Metrics that are columns of rounds."""


def _curve(run: Run, series: str, thinned: _Thinned, jobs: Sequence[_Job]) -> Curve:
    kept, total = thinned
    begun = run.first_step_at or run.started_at or run.created_at
    unpriced = getattr(run, "unpriced", True) or any(job.usd_h is None for job in jobs)
    return Curve(
        run=str(run.pk),
        series=series,
        tokens=kept.tokens,
        wall_s=np.maximum(kept.wall_s - begun.timestamp(), 0.0),
        usd=None if unpriced else spent_at(jobs, kept.wall_s),
        value=kept.value,
        total=total,
    )


def _stored(runs: Sequence[Run], names: Sequence[str]) -> dict[tuple[Any, str], _Thinned]:
    """Series of the runs themselves."""
    return {key: _thin(parts) for key, parts in _series(runs, names)}


def _series(
    runs: Sequence[Run], names: Sequence[str]
) -> Iterator[tuple[tuple[Any, str], list[Points]]]:
    rows = (
        MetricBlock.objects.filter(run__in=runs, replica=None, series__in=names, level=0)
        .order_by("run", "series", "index")
        .values_list("run", "series", "data")
    )
    for key, blocks in groupby(rows.iterator(chunk_size=BLOCKS), key=lambda row: row[:2]):
        yield key, [Points.unpack(bytes(data)) for *_, data in blocks]


def _goodput(runs: Sequence[Run]) -> dict[tuple[Any, str], _Thinned]:
    """The share of compute in the time of all phases of a round."""
    series = _series(runs, [f"phase_{group}" for group in GROUPS])
    found = {}
    for run, of_run in groupby(series, key=lambda item: item[0][0]):
        phases = {name: concatenate(parts) for (_, name), parts in of_run}
        compute = phases.get("phase_compute")
        if compute is None:
            continue
        same = [each for each in phases.values() if np.array_equal(each.round, compute.round)]
        total = np.sum([each.value for each in same], axis=0)
        share = np.full(len(compute), np.nan)
        np.divide(compute.value, total, out=share, where=total > 0)
        found[run, "goodput"] = _thin([replace(compute, value=share)])
    return found


def _rounds(runs: Sequence[Run], name: str) -> dict[tuple[Any, str], _Thinned]:
    rows = (
        Round.objects.filter(run__in=runs, committed_at__isnull=False, **{f"{name}__isnull": False})
        .order_by("run", "number")
        .values_list("run", "number", "tokens_total", "committed_at", name)
    )
    return {
        (run, name): _thin(list(_packed(lines)))
        for run, lines in groupby(rows.iterator(chunk_size=ROWS), key=lambda row: row[0])
    }


def _packed(lines: Iterator[tuple[Any, ...]]) -> Iterator[Points]:
    while chunk := list(islice(lines, ROWS)):
        _, number, tokens, at, loss = zip(*chunk, strict=True)
        wall_s = [moment.timestamp() for moment in at]
        yield Points.of(step=number, round=number, tokens=tokens, wall_s=wall_s, value=loss)


def _thin(parts: Sequence[Points]) -> _Thinned:
    """Downsample one run at a time, so that memory holds at most the longest of them."""
    points = concatenate(parts)
    kept, _ = thin(points, "round", CURVE_POINTS)
    return kept, len(points)


@dataclass(frozen=True, kw_only=True)
class _Job:
    began: float
    ended: float
    usd_h: float | None


def _spending(runs: Iterable[Run]) -> dict[Any, list[_Job]]:
    rows = ReplicaAttempt.objects.filter(replica__run__in=list(runs)).values_list(
        "replica__run", "started_at", "launched_at", "ended_at", "price_usd_h"
    )
    jobs: dict[Any, list[_Job]] = {}
    for run, started, launched, ended, price in rows:
        began = started or launched
        if began is not None:
            end = ended.timestamp() if ended else math.inf
            jobs.setdefault(run, []).append(_Job(began=began.timestamp(), ended=end, usd_h=price))
    return jobs


def spent_at(jobs: Sequence[_Job], at: NDArray[Any]) -> NDArray[Any]:
    """Dollars spent until each time in ``at`` (seconds since the epoch).

    The sum is linear between the times at which jobs begin and end, so a curve of a run with
    hundreds of jobs costs no pass for each of them.
    """
    if not jobs:
        return np.zeros(len(at))
    rate = np.array([(job.usd_h or 0.0) / 3600 for job in jobs])
    began = np.array([job.began for job in jobs])
    ended = np.maximum([job.ended for job in jobs], began)
    has_ended = np.isfinite(ended)
    times = np.concatenate([began, ended[has_ended]])
    order = np.argsort(times)
    times, rates = times[order], np.cumsum(np.concatenate([rate, -rate[has_ended]])[order])
    usd = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(times))])
    place = np.searchsorted(times, at, side="right") - 1
    return np.where(place < 0, 0.0, usd[place] + rates[place] * (at - times[place]))
