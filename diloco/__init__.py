"""The replica library: DiLoCo over an object store.

Importing the package imports neither torch nor fsspec; the names below are loaded on first use
(PEP 562), so the control plane can import :mod:`diloco.protocol` on a machine without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.allreduce import ObjectStoreAllReduce
    from diloco.errors import (
        FencedOut,
        GroupExists,
        ModelMismatch,
        ReplicaError,
        SettingsMismatch,
        StopReason,
    )
    from diloco.group import Group, join
    from diloco.init import create_group
    from diloco.inspect import inspect
    from diloco.inspection.picture import Picture
    from diloco.manager import Manager, WorldSizeMode
    from diloco.planner.prediction import PlanEstimate, PlanRequest
    from diloco.protocol.group_document import GroupDocument
    from diloco.protocol.settings import GroupSettings, SettingsError
    from diloco.simulate import Simulation, simulate
    from diloco.torchft.outer_loop import MockManager, make_diloco_outer_loop
    from diloco.training.progress import RoundProgress

__version__ = "0.1.0"

_HOME = {
    "FencedOut": "diloco.errors",
    "Group": "diloco.group",
    "GroupDocument": "diloco.protocol.group_document",
    "GroupExists": "diloco.errors",
    "GroupSettings": "diloco.protocol.settings",
    "Manager": "diloco.manager",
    "MockManager": "diloco.torchft.outer_loop",
    "ModelMismatch": "diloco.errors",
    "ObjectStoreAllReduce": "diloco.allreduce",
    "Picture": "diloco.inspection.picture",
    "PlanEstimate": "diloco.planner.prediction",
    "PlanRequest": "diloco.planner.prediction",
    "ReplicaError": "diloco.errors",
    "RoundProgress": "diloco.training.progress",
    "SettingsError": "diloco.protocol.settings",
    "SettingsMismatch": "diloco.errors",
    "Simulation": "diloco.simulate",
    "StopReason": "diloco.errors",
    "WorldSizeMode": "diloco.manager",
    "create_group": "diloco.init",
    "join": "diloco.group",
    "make_diloco_outer_loop": "diloco.torchft.outer_loop",
}
"""The module of each public name."""

_CALLABLE = ("inspect", "simulate")
"""Public functions that are modules (:mod:`diloco.callable_module`)."""

__all__ = [
    "FencedOut",
    "Group",
    "GroupDocument",
    "GroupExists",
    "GroupSettings",
    "Manager",
    "MockManager",
    "ModelMismatch",
    "ObjectStoreAllReduce",
    "Picture",
    "PlanEstimate",
    "PlanRequest",
    "ReplicaError",
    "RoundProgress",
    "SettingsError",
    "SettingsMismatch",
    "Simulation",
    "StopReason",
    "WorldSizeMode",
    "create_group",
    "inspect",
    "join",
    "make_diloco_outer_loop",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return importlib.import_module(f"diloco.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from diloco.errors import install_extra

        raise ModuleNotFoundError(
            f"diloco.{name}: expected torch, found none; {install_extra('torch')}",
            name="torch",
        ) from None


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
