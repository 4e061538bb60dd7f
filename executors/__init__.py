"""Backends that run replicas, one file each, behind one protocol.

Every executor is importable from here; its SDK is loaded only when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from executors.registry import CLASSES

if TYPE_CHECKING:
    from executors.local.executor import LocalProcessExecutor

_HOME = {path.partition(":")[2]: path.partition(":")[0] for path in CLASSES.values()}

__all__ = [
    "HFJobsExecutor",
    "KubernetesExecutor",
    "LocalProcessExecutor",
    "ModalExecutor",
    "SageMakerExecutor",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'executors' has no attribute {name!r}")
