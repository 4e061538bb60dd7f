"""Data of the charts, requested on zoom: series by window, outcomes by round, bars by time.

The format is compact and private to the page: whole numbers as differences, values with six digits.
A chart of a million points is one response of about 50 kB. The API's export has every point.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_safe
from numpy.typing import NDArray

from dashboard.views.access import bare_run
from runs.ingest.limits import INT_LIMIT, SMALL_LIMIT
from runs.metrics import charts, round_strips, timeline
from runs.metrics.bands import Band, band
from runs.metrics.blocks import nonfinite
from runs.metrics.charts import AXES, Axis, Curve, Scales, Window
from runs.models import Run
from runs.queries import round_summaries, selectors

MAX_SERIES = 12
MAX_POINTS = 10_000
OVERLAYS = 16
"""Up to so many replicas are drawn as separate lines; more are drawn as a band, plus the replicas
that are selected by number."""
LEAST_POINTS = 300
MAX_COLUMNS = 2000
COMPACT = {"separators": (",", ":")}


class BadParameter(ValueError):
    """An invalid query parameter. The message is sent to the client."""


def _chart_data(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """A view of chart data: compressed, never cached, and 400 for an invalid parameter."""

    @require_safe
    @never_cache
    @gzip_page
    @wraps(view)
    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return view(request, *args, **kwargs)
        except BadParameter as error:
            return HttpResponseBadRequest(str(error))

    return answer


@_chart_data
def series(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Series of a window: ``?of=loss,eval_loss&x=wall&from=&to=&points=4000&replica=3,7``.

    ``last=1``: only the last point of each bucket, so that series can be stacked. ``own=3``: only
    that replica, with the band of all replicas.
    """
    run = bare_run(request, run_id)
    wanted = [name for name in request.GET.get("of", "").split(",") if name]
    if not 1 <= len(wanted) <= MAX_SERIES:
        raise BadParameter(f"of: expected 1 to {MAX_SERIES} series, found {len(wanted)}")
    for name in wanted:
        if not name.isprintable():  # PostgreSQL rejects NUL in a query
            raise BadParameter(f"of: expected names of series, found {name!r}")
    x = request.GET.get("x", "step")
    axis: Axis = next((a for a in AXES if a == x), "wall")
    if x not in (*AXES, "relative"):
        raise BadParameter(f"x: expected one of {', '.join(AXES)}, relative, found {x!r}")
    origin = _origin(run) if x == "relative" else 0.0
    low, high = (_end(request, name, origin) for name in ("from", "to"))
    budget = _whole(request, "points", default=4000, most=MAX_POINTS)
    shown = _numbers(request, "replica")
    scales = Scales(
        sync_every=int(run.group_settings["sync_every"]),
        replicas=_wanted(run) if axis == "tokens" else 1,
    )
    names = charts.names_of(run, wanted)
    replicas = {owner for _, owner in names if owner is not None}
    own = _numbers(request, "own")
    drawn = replicas if len(replicas) <= OVERLAYS and not own else replicas & {*shown, *own}
    each = max(budget // max(len(replicas), 1), LEAST_POINTS * (1 if drawn == replicas else 2))
    window = Window(axis=axis, low=low, high=high, max_points=each, scales=scales)
    stored = charts.read_stored(run, names, window)
    if request.GET.get("last"):
        stored = [charts.lasts(curve) for curve in stored]
    lines = [c for c in stored if c.owner is None or c.owner in drawn]
    curves = charts.downsample(lines, window.max_points)
    # A band is aggregated from all points, so curves that are not drawn are not downsampled.
    used = (
        curves
        if drawn == replicas
        else [
            *curves,
            *(c for c in stored if c.owner is not None and c.owner not in drawn),
        ]
    )
    body = {
        "x": x,
        "origin": origin,
        "replicas": len(replicas),
        "curves": [curve_row(c, axis=axis, scales=scales, origin=origin) for c in curves],
        "band": band_row(
            band([c for c in used if c.owner is not None], axis=axis, scales=scales),
            axis=axis,
            origin=origin,
        )
        if len(replicas) > 1
        else None,
        "points": sum(len(c.points) for c in used),
        "total": sum(c.total for c in used),
    }
    return JsonResponse(body, json_dumps_params=COMPACT)


def _wanted(run: Run) -> int:
    """The number of replicas of all pools."""
    return sum(run.pools.values_list("count", flat=True)) or int(run.group_settings["num_replicas"])


def curve_row(curve: Curve, *, axis: Axis, scales: Scales, origin: float) -> dict[str, Any]:
    """One curve. ``x``: first value and differences, in units of ``unit``; ``y``: six digits."""
    column, factor = scales.of(axis, curve.owner)
    raw = getattr(curve.points, column)
    unit = factor
    if axis == "wall":
        raw, unit = np.round((raw - origin) * 1000).astype(np.int64), 0.001
    return {
        "series": curve.series,
        "replica": curve.owner,
        "unit": unit,
        "x": differences(raw),
        "y": short(curve.points.value),
        "odd": nonfinite(curve.points.value.tolist()),
        "total": curve.total,
        "level": curve.level,
    }


def band_row(spread: Band, *, axis: Axis, origin: float) -> dict[str, Any]:
    x = spread.x - origin if axis == "wall" else spread.x
    return {
        "unit": 0.001,
        "x": differences(np.round(x * 1000).astype(np.int64)),
        **{name: short(getattr(spread, name)) for name in ("low", "mean", "high")},
        "newest": list(zip(spread.newest, short(np.array([*spread.newest.values()])), strict=True)),
    }


def differences(whole: NDArray[Any]) -> list[int]:
    result: list[int] = np.diff(whole, prepend=0).tolist()
    return result


def short(values: NDArray[Any]) -> list[float | None]:
    """Values with six significant digits, more than a screen can show; null if not finite."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


@_chart_data
def heatmap(request: HttpRequest, run_id: Any) -> HttpResponse:
    """``?below=4000``: outcomes of all rounds below that number, one digit per replica. For late
    contributions also their positions, as differences, and their lateness in tenths of seconds."""
    run = bare_run(request, run_id)
    below = _whole(request, "below", default=SMALL_LIMIT, most=SMALL_LIMIT)
    grid = timeline.outcomes(run, below=below)
    kinds = sorted(set(grid.states))
    size = grid.outcomes.shape[1]
    body = {
        "late": differences(grid.late_in * size + grid.late["replica"].astype(np.int64)),
        "late_ds": np.rint(grid.late["late_s"] * 10).astype(np.int64).tolist(),
        "at_ds": differences(np.rint(grid.committed * 10).astype(np.int64)),
        "tokens": differences(grid.tokens),
        "numbers": differences(np.array(grid.numbers, dtype=np.int64)),
        "kinds": kinds,
        "states": "".join(str(kinds.index(state)) for state in grid.states),
        "replicas": size,
        "names": round_strips.OUTCOMES,
        "outcomes": (grid.outcomes + ord("0")).tobytes().decode("ascii"),
    }
    return JsonResponse(body, json_dumps_params=COMPACT)


@require_safe
@never_cache
def one_round(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    """One round in the format of the snapshot, for rounds that are too old to be in it."""
    run = bare_run(request, run_id)
    rows = selectors.round_rows(run, numbers=[min(number, SMALL_LIMIT)])
    if not rows:
        raise Http404(f"no round {number}")
    return JsonResponse({"round": rows[0]})


@_chart_data
def rounds_before(request: HttpRequest, run_id: Any) -> HttpResponse:
    """``?below=401``: summaries of the newest rounds below that number."""
    run = bare_run(request, run_id)
    below = _whole(request, "below", default=SMALL_LIMIT, most=SMALL_LIMIT)
    replicas = run.replicas.count()
    rows = round_summaries.summaries(run, before=below, replicas=replicas)
    return JsonResponse({"rounds": rows}, json_dumps_params=COMPACT)


@_chart_data
def bars(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Activity of the replicas as bars or a raster: ``?from=&to=&columns=800`` (Unix seconds)."""
    run = bare_run(request, run_id)
    low, high = (_end(request, name, 0.0) for name in ("from", "to"))
    columns = _whole(request, "columns", default=800, most=MAX_COLUMNS)
    if low is not None and high is not None and low >= high:
        raise BadParameter(f"expected from before to, found {low} and {high}")
    activity = timeline.timeline(run, low=low, high=high, columns=columns)
    body: dict[str, Any] = {
        "from": activity.low,
        "to": activity.high,
        "first": activity.first,
        "last": activity.last,
        "replicas": activity.replicas,
        "groups": [*round_strips.GROUPS, "down"],
        "commits": [[n, round(at - activity.low, 3), state] for n, at, state in activity.commits],
        "slowest": activity.slowest,
        "counted": activity.counted,
        "bars": None,
        "cells": None,
    }
    if activity.bars is not None:
        milliseconds = np.rint(activity.bars.phases * 1000).astype(np.int64)
        body["bars"] = {
            "number": activity.bars.number.tolist(),
            "replica": activity.bars.replica.tolist(),
            "outcome": [round_strips.OUTCOMES[o] for o in activity.bars.outcome.tolist()],
            "started": np.rint((activity.bars.started - activity.low) * 1000).astype(int).tolist(),
            "phases": milliseconds.tolist(),
        }
    if activity.cells is not None:
        body["columns"] = columns
        body["cells"] = base64.b64encode(activity.cells.tobytes()).decode("ascii")
    return JsonResponse(body, json_dumps_params=COMPACT)


def _origin(run: Run) -> float:
    start = run.first_step_at or run.started_at or run.created_at
    return start.timestamp()


def _end(request: HttpRequest, name: str, origin: float) -> float | None:
    text = request.GET.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= INT_LIMIT:
        raise BadParameter(f"{name}: expected a number, found {text[:40]!r}")
    return value + origin


def _whole(request: HttpRequest, name: str, *, default: int, most: int) -> int:
    text = request.GET.get(name) or str(default)
    fits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not fits or not 1 <= int(text) <= most:
        raise BadParameter(f"{name}: expected a whole number of 1 to {most}, found {text[:40]!r}")
    return int(text)


def _numbers(request: HttpRequest, name: str) -> Sequence[int]:
    texts = [text for text in request.GET.get(name, "").split(",") if text][:OVERLAYS]
    if not all(text.isascii() and text.isdecimal() and len(text) < 8 for text in texts):
        raise BadParameter(f"{name}: expected numbers of replicas, found {','.join(texts)[:40]!r}")
    return [int(text) for text in texts]
