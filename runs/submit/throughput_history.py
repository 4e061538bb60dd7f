"""Throughput of hardware for a workload, as measured in earlier runs.

Estimates of duration and cost need a rate. If no run trained the same model on the same hardware,
there is none, and the estimate is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from diloco.protocol.workload import WORKLOADS
from runs.models import Replica

LOOK_BACK = 1000
"""Newest replicas that are considered, so that the cost does not grow with the server's age."""


def known_rates(workload: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Tokens per second of one replica, by (backend, hardware): the median of earlier runs."""
    [rates] = rates_of_all([workload])
    return rates


def rates_of_all(workloads: Iterable[Mapping[str, Any]]) -> list[dict[tuple[str, str], float]]:
    """:func:`known_rates` of each workload, with one query."""
    identities = [_identity(workload) for workload in workloads]
    found: dict[tuple[Any, ...], dict[tuple[str, str], list[float]]]
    found = {identity: {} for identity in identities}
    newest = Replica.objects.filter(tokens_per_s__gt=0).order_by("-id")
    for backend, hardware, workload, rate in newest.values_list(
        "pool__backend", "pool__hardware", "run__workload", "tokens_per_s"
    )[:LOOK_BACK]:
        by_hardware = found.get(_identity(workload))
        if rate is not None and by_hardware is not None:
            by_hardware.setdefault((backend, hardware), []).append(rate)
    return [
        {hardware: median(rates) for hardware, rates in found[identity].items()}
        for identity in identities
    ]


def _identity(workload: Mapping[str, Any]) -> tuple[Any, ...]:
    """The fields that decide how fast a workload is: the model, not its data."""
    described = WORKLOADS.get(str(workload.get("kind")))
    names = described.model_fields if described else ()
    return tuple(repr(workload.get(name)) for name in ("kind", "context", *names))
