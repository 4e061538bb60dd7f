"""The replica library: DiLoCo over an object store.

Importing the package imports neither torch nor fsspec; the names below are loaded on first use
(PEP 562), so the control plane can import :mod:`diloco.protocol` on a machine without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.allreduce import ObjectStoreAllReduce
    from diloco.errors import FencedOut, ModelMismatch, ReplicaError
    from diloco.group import Group, join
    from diloco.init import create_group
    from diloco.manager import Manager, WorldSizeMode
    from diloco.protocol.group_document import GroupDocument
    from diloco.protocol.settings import GroupSettings
    from diloco.torchft.outer_loop import MockManager, make_diloco_outer_loop

__version__ = "0.1.0"

_HOME = {
    "FencedOut": "diloco.errors",
    "ModelMismatch": "diloco.errors",
    "ReplicaError": "diloco.errors",
    "Group": "diloco.group",
    "ObjectStoreAllReduce": "diloco.allreduce",
    "Manager": "diloco.manager",
    "MockManager": "diloco.torchft.outer_loop",
    "WorldSizeMode": "diloco.manager",
    "join": "diloco.group",
    "create_group": "diloco.init",
    "make_diloco_outer_loop": "diloco.torchft.outer_loop",
    "GroupDocument": "diloco.protocol.group_document",
    "GroupSettings": "diloco.protocol.settings",
}

__all__ = [
    "FencedOut",
    "Group",
    "GroupDocument",
    "GroupSettings",
    "Manager",
    "MockManager",
    "ModelMismatch",
    "ObjectStoreAllReduce",
    "ReplicaError",
    "WorldSizeMode",
    "create_group",
    "join",
    "make_diloco_outer_loop",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"diloco.{name}: expected torch, found none; pip install 'archipelago-diloco[torch]'",
            name="torch",
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
