"""Names of the series of evaluation results: ``eval-<plan>-<metric>``. Metrics have no hyphen."""

from __future__ import annotations

PREFIX = "eval-"
"""Begins the names of series of results; no other series of a run does."""


def series_name(plan: str, metric: str) -> str:
    """The run's series of a metric, for charts, exports, trackers and the API."""
    return f"{PREFIX}{plan}-{metric}"


def plan_part(series: str) -> str:
    """``eval-<plan>`` of a series; '' for another series."""
    return series.rpartition("-")[0] if series.startswith(PREFIX) else ""
