"""How fast hardware has been at a workload: what earlier runs here measured.

An estimate of how long a run will take, and so of what it will cost, needs a rate. Where nobody has
trained the same model on the same hardware there is none, and the estimate says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from runs.models import Replica

LOOK_BACK = 1000
"""Newest replicas that are looked at, so that the answer costs the same on an old server."""


def known_rates(workload: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """(backend, hardware) -> tokens per second of one replica, the median of those seen."""
    same = _identity(workload)
    seen: dict[tuple[str, str], list[float]] = {}
    newest = Replica.objects.filter(tokens_per_s__gt=0).order_by("-id")
    for backend, hardware, found, rate in newest.values_list(
        "pool__backend", "pool__hardware", "run__workload", "tokens_per_s"
    )[:LOOK_BACK]:
        if rate is not None and _identity(found) == same:
            seen.setdefault((backend, hardware), []).append(rate)
    return {place: median(rates) for place, rates in seen.items()}


def _identity(workload: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides how fast a workload is: the model, not its data."""
    names = ("kind", "size", "model", "config", "context", "function")
    return tuple(repr(workload.get(name)) for name in names)
