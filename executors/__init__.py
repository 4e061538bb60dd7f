"""Backends that run replicas: one folder each, behind one interface (:mod:`executors.executor`).

Every executor class can be imported from here; its module and SDK load on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from executors.registry import DESCRIPTIONS

if TYPE_CHECKING:
    from executors.local.executor import LocalProcessExecutor as LocalProcessExecutor

_MODULES = {
    name: module
    for module, _, name in (each.executor.partition(":") for each in DESCRIPTIONS.values())
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'executors' has no attribute {name!r}")
