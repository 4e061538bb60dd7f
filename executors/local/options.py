"""The options of local replicas, checked: limits for one, and what this machine has.

``memory_mb``: a replica whose processes together hold more (resident, in MiB) is killed; looked at
every :data:`~executors.local.shim.MEMORY_EVERY_S`, so that a quick one can overshoot.
``nice``: added to the replica's niceness, 0 to 19.
``grace_s``: seconds between SIGTERM and SIGKILL.
``gpus``: see :func:`executors.local.gpus.gpus_of`; of the executor only.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from executors.base import LaunchRefused

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL by default: a replica that is stopped by force is gone in 10 s."""

MAX_GRACE_S = 300.0

_RANGES: dict[str, tuple[float, float]] = {
    "memory_mb": (1, float("inf")),
    "nice": (0, 19),
    "grace_s": (0, MAX_GRACE_S),
}
_OF_EXECUTOR = "gpus"
POOL_OPTIONS = frozenset(_RANGES)
"""Options a pool can set by itself, where the server does not set them for the backend."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    grace_s: float
    memory_bytes: int | None
    nice: int


def read_options(executors: Mapping[str, Any], replicas: Mapping[str, Any]) -> LocalOptions:
    """The executor's own, and over them one replica's. Raises :class:`LaunchRefused`."""
    if _OF_EXECUTOR in replicas:
        raise LaunchRefused(f"options: {_OF_EXECUTOR} is set for the backend, not for a replica")
    given = {**executors, **replicas}
    given.pop(_OF_EXECUTOR, None)
    if unknown := sorted(set(given) - set(_RANGES)):
        known = ", ".join((*_RANGES, _OF_EXECUTOR))
        raise LaunchRefused(f"options: expected {known}, found {', '.join(unknown)}")
    for name, value in given.items():
        low, high = _RANGES[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            most = "" if high == float("inf") else f" and at most {high:g}"
            raise LaunchRefused(
                f"options.{name}: expected a number of at least {low:g}{most}, found {value!r}"
            )
    memory_mb = given.get("memory_mb")
    return LocalOptions(
        grace_s=float(given.get("grace_s", GRACE_S)),
        memory_bytes=None if memory_mb is None else int(memory_mb * (1 << 20)),
        nice=int(given.get("nice", 0)),
    )


def this_machine(gpus: int) -> str:
    """For a person."""
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    return (
        f"{platform.node() or 'this machine'}: {os.cpu_count() or 1} cores, "
        f"{memory_gib:.0f} GiB memory, {gpus} GPU{'' if gpus == 1 else 's'}"
    )
