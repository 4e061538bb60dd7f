"""Throughput of hardware for a workload, as measured in earlier runs.

Estimates of duration and cost need a rate. If no run trained the same model on the same hardware,
there is none, and the estimate is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from runs.models import Replica

LOOK_BACK = 1000
"""Newest replicas that are considered, so that the cost does not grow with the server's age."""


def known_rates(workload: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Tokens per second of one replica, by (backend, hardware): the median of earlier runs."""
    same = _identity(workload)
    rates_by_hardware: dict[tuple[str, str], list[float]] = {}
    newest = Replica.objects.filter(tokens_per_s__gt=0).order_by("-id")
    for backend, hardware, other_workload, rate in newest.values_list(
        "pool__backend", "pool__hardware", "run__workload", "tokens_per_s"
    )[:LOOK_BACK]:
        if rate is not None and _identity(other_workload) == same:
            rates_by_hardware.setdefault((backend, hardware), []).append(rate)
    return {hardware_key: median(rates) for hardware_key, rates in rates_by_hardware.items()}


def _identity(workload: Mapping[str, Any]) -> tuple[Any, ...]:
    """The fields that decide how fast a workload is: the model, not its data."""
    names = ("kind", "size", "model", "config", "context", "function")
    return tuple(repr(workload.get(name)) for name in names)
