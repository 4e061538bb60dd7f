"""What charts ask for as they are zoomed: series by window, outcomes by round, bars by time.

Numbers are packed for the page alone (whole numbers as differences, values to six digits), so that
a chart of a million points is one answer of some 50 kB. Whoever wants all of them, unsampled, asks
the API for an export.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_safe
from numpy.typing import NDArray

from dashboard.views.access import run_to_see
from runs.ingest.limits import INT_LIMIT, SMALL_LIMIT
from runs.metrics import charts, round_strips, timeline
from runs.metrics.bands import Band, band
from runs.metrics.charts import AXES, Axis, Curve, Scales, Window
from runs.metrics.columns import nonfinite
from runs.models import Run
from runs.queries import selectors

MAX_SERIES = 12
MAX_POINTS = 10_000
OVERLAYS = 16
"""Replicas that are drawn one by one; more are a band, and those that are asked for by number."""
LEAST_POINTS = 300
MAX_COLUMNS = 2000
COMPACT = {"separators": (",", ":")}


class BadQuestion(ValueError):
    """A parameter that makes no sense; its message is for whoever sent it."""


@require_safe
@never_cache
@gzip_page
def series(request: HttpRequest, run_id: Any) -> HttpResponse:
    """``?of=loss,eval_loss&x=wall&from=&to=&points=4000&replica=3,7``: curves of a window.
    ``last=1``: of each bucket the last point alone, so that series can be stacked. ``own=3``: of
    that replica alone, against the band of all."""
    run = run_to_see(request, run_id)
    try:
        answer = _series(run, request)
    except BadQuestion as error:
        return HttpResponseBadRequest(str(error))
    return JsonResponse(answer, json_dumps_params=COMPACT)


def _series(run: Run, request: HttpRequest) -> dict[str, Any]:
    wanted = [name for name in request.GET.get("of", "").split(",") if name]
    if not 1 <= len(wanted) <= MAX_SERIES:
        raise BadQuestion(f"of: expected 1 to {MAX_SERIES} series, found {len(wanted)}")
    for name in wanted:
        if not name.isprintable():  # which no series is, and PostgreSQL cannot be asked for NUL
            raise BadQuestion(f"of: expected names of series, found {name!r}")
    asked = request.GET.get("x", "step")
    axis: Axis = next((a for a in AXES if a == asked), "wall")
    if asked not in (*AXES, "relative"):
        raise BadQuestion(f"x: expected one of {', '.join(AXES)}, relative, found {asked!r}")
    origin = _origin(run) if asked == "relative" else 0.0
    low, high = (_end(request, name, origin) for name in ("from", "to"))
    budget = _whole(request, "points", default=4000, most=MAX_POINTS)
    shown = _numbers(request, "replica")
    found: Any = run  # with what runs_for adds
    scales = Scales(
        sync_every=int(run.group_settings["sync_every"]),
        replicas=found.wanted or int(run.group_settings["num_replicas"]),
    )
    names = charts.names_of(run, wanted)
    replicas = {owner for _, owner in names if owner is not None}
    own = _numbers(request, "own")
    drawn = replicas if len(replicas) <= OVERLAYS and not own else replicas & {*shown, *own}
    each = max(budget // max(len(replicas), 1), LEAST_POINTS * (1 if drawn == replicas else 2))
    window = Window(axis=axis, low=low, high=high, max_points=each, scales=scales)
    curves = charts.read(run, names, window)
    if request.GET.get("last"):
        curves = [charts.lasts(curve) for curve in curves]
    theirs = [c for c in curves if c.owner is not None]
    return {
        "x": asked,
        "origin": origin,
        "replicas": len(replicas),
        "curves": [
            curve_row(c, axis=axis, scales=scales, origin=origin)
            for c in curves
            if c.owner is None or c.owner in drawn
        ],
        "band": band_row(band(theirs, axis=axis, scales=scales), axis=axis, origin=origin)
        if len(replicas) > 1
        else None,
        "points": sum(len(c.points) for c in curves),
        "total": sum(c.total for c in curves),
    }


def curve_row(curve: Curve, *, axis: Axis, scales: Scales, origin: float) -> dict[str, Any]:
    """``x`` as first value and differences, in whole units of ``unit``; ``y`` to six digits."""
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


def band_row(found: Band, *, axis: Axis, origin: float) -> dict[str, Any]:
    x = found.x - origin if axis == "wall" else found.x
    return {
        "unit": 0.001,
        "x": differences(np.round(x * 1000).astype(np.int64)),
        **{name: short(getattr(found, name)) for name in ("low", "mean", "high")},
    }


def differences(whole: NDArray[Any]) -> list[int]:
    found: list[int] = np.diff(whole, prepend=0).tolist()
    return found


def short(values: NDArray[Any]) -> list[float | None]:
    """Six significant digits: more than a screen has pixels. Not a number: null."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


@require_safe
@never_cache
@gzip_page
def heatmap(request: HttpRequest, run_id: Any) -> HttpResponse:
    """``?below=4000``: outcomes of all rounds before that number, one digit per replica; and of
    late ones whose lateness is known the places of those digits, as differences, and tenths of
    seconds."""
    run = run_to_see(request, run_id)
    try:
        below = _whole(request, "below", default=SMALL_LIMIT, most=SMALL_LIMIT)
    except BadQuestion as error:
        return HttpResponseBadRequest(str(error))
    found = timeline.outcomes(run, below=below)
    kinds = sorted(set(found.states))
    size = found.outcomes.shape[1]
    answer = {
        "late": differences(found.late_in * size + found.late["replica"].astype(np.int64)),
        "late_ds": np.rint(found.late["late_s"] * 10).astype(np.int64).tolist(),
        "numbers": differences(np.array(found.numbers, dtype=np.int64)),
        "kinds": kinds,
        "states": "".join(str(kinds.index(state)) for state in found.states),
        "replicas": size,
        "names": round_strips.OUTCOMES,
        "outcomes": (found.outcomes + ord("0")).tobytes().decode("ascii"),
    }
    return JsonResponse(answer, json_dumps_params=COMPACT)


@require_safe
@never_cache
def one_round(request: HttpRequest, run_id: Any, number: int) -> HttpResponse:
    """A round as a snapshot has it, for one that is too old to be in there."""
    run = run_to_see(request, run_id)
    rows = selectors.round_rows(run, numbers=[min(number, SMALL_LIMIT)])
    if not rows:
        raise Http404(f"no round {number}")
    return JsonResponse({"round": rows[0]})


@require_safe
@never_cache
@gzip_page
def bars(request: HttpRequest, run_id: Any) -> HttpResponse:
    """``?from=&to=&columns=800`` (seconds since 1970): who did what when, as bars or a raster."""
    run = run_to_see(request, run_id)
    try:
        low, high = (_end(request, name, 0.0) for name in ("from", "to"))
        columns = _whole(request, "columns", default=800, most=MAX_COLUMNS)
        if low is not None and high is not None and low >= high:
            raise BadQuestion(f"expected from before to, found {low} and {high}")
    except BadQuestion as error:
        return HttpResponseBadRequest(str(error))
    found = timeline.timeline(run, low=low, high=high, columns=columns)
    answer: dict[str, Any] = {
        "from": found.low,
        "to": found.high,
        "first": found.first,
        "last": found.last,
        "replicas": found.replicas,
        "groups": [*round_strips.GROUPS, "down"],
        "commits": [[n, round(at - found.low, 3), state] for n, at, state in found.commits],
        "slowest": found.slowest,
        "counted": found.counted,
        "bars": None,
        "cells": None,
    }
    if found.bars is not None:
        milliseconds = np.rint(found.bars.phases * 1000).astype(np.int64)
        answer["bars"] = {
            "number": found.bars.number.tolist(),
            "replica": found.bars.replica.tolist(),
            "outcome": [round_strips.OUTCOMES[o] for o in found.bars.outcome.tolist()],
            "started": np.rint((found.bars.started - found.low) * 1000).astype(int).tolist(),
            "phases": milliseconds.tolist(),
        }
    if found.cells is not None:
        answer["columns"] = columns
        answer["cells"] = base64.b64encode(found.cells.tobytes()).decode("ascii")
    return JsonResponse(answer, json_dumps_params=COMPACT)


def _origin(run: Run) -> float:
    begun = run.first_step_at or run.started_at or run.created_at
    return begun.timestamp()


def _end(request: HttpRequest, name: str, origin: float) -> float | None:
    text = request.GET.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= INT_LIMIT:
        raise BadQuestion(f"{name}: expected a number, found {text[:40]!r}")
    return value + origin


def _whole(request: HttpRequest, name: str, *, default: int, most: int) -> int:
    text = request.GET.get(name) or str(default)
    fits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not fits or not 1 <= int(text) <= most:
        raise BadQuestion(f"{name}: expected a whole number of 1 to {most}, found {text[:40]!r}")
    return int(text)


def _numbers(request: HttpRequest, name: str) -> Sequence[int]:
    texts = [text for text in request.GET.get(name, "").split(",") if text][:OVERLAYS]
    if not all(text.isascii() and text.isdecimal() and len(text) < 8 for text in texts):
        raise BadQuestion(f"{name}: expected numbers of replicas, found {','.join(texts)[:40]!r}")
    return [int(text) for text in texts]
