"""Curves of several runs for charts and the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runs.json_values import finite
from runs.models import Run
from runs.queries import comparison
from runs.queries.comparison import LOSSES, Curve


def curves_body(runs: list[Run], metrics: Sequence[str] = LOSSES) -> dict[str, Any]:
    """Curves of runs by metric, with each of the axes."""
    return {
        "runs": [{"id": str(run.pk), "name": run.name} for run in runs],
        "curves": [_columns(curve) for curve in comparison.curves(runs, metrics)],
    }


def _columns(curve: Curve) -> dict[str, Any]:
    return {
        "run": curve.run,
        "series": curve.series,
        "tokens": curve.tokens.tolist(),
        "wall": [round(s, 2) for s in curve.wall_s.tolist()],
        "money": None if curve.usd is None else [round(usd, 6) for usd in curve.usd.tolist()],
        "value": [finite(v) for v in curve.value.tolist()],
        "total": curve.total,
    }
