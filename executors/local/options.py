"""Options of local replicas."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import psutil

from executors import options as declared
from executors.options import Scope, option

GRACE_S = 5.0
"""Default time between SIGTERM and SIGKILL: a replica that is stopped by force ends within 10 s."""

MAX_GRACE_S = 300.0


def _gpu_names(name: str, value: object) -> object:
    if isinstance(value, str | list | tuple):
        return value
    raise declared.refused(name, "a list of GPUs, or their names with commas", value)


@dataclass(frozen=True, kw_only=True)
class Options:
    memory_mb: float | None = option(
        None,
        label="Memory limit",
        unit="MiB",
        minimum=1,
        scope=Scope.POOL,
        help="Resident memory of all processes of a replica together. A replica above it is "
        "killed. It is measured every 0.25 s, so a fast allocation can exceed it for a moment.",
    )
    nice: int = option(
        0,
        label="Niceness",
        minimum=0,
        maximum=19,
        scope=Scope.POOL,
        help="Added to the niceness of the replica",
    )
    grace_s: float = option(
        GRACE_S,
        label="Grace period",
        unit="s",
        minimum=0,
        maximum=MAX_GRACE_S,
        scope=Scope.POOL,
        help="Time between SIGTERM and SIGKILL",
    )
    gpus: Any = option(  # noqa: RUF009
        None,
        label="GPUs",
        scope=Scope.EXECUTOR,
        check=_gpu_names,
        help="GPUs that replicas can use, as CUDA_VISIBLE_DEVICES names them",
    )

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_mb is None else int(self.memory_mb * (1 << 20))


def describe_machine(gpus: int) -> str:
    """Name, cores, memory and GPUs of this machine, for display."""
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    return (
        f"{platform.node() or 'this machine'}: {os.cpu_count() or 1} cores, "
        f"{memory_gib:.0f} GiB memory, {gpus} GPU{'' if gpus == 1 else 's'}"
    )
