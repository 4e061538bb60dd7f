"""A Manager with the interface of torchft 0.2.0 that needs only an object store.

Change the import and pass a bucket. The implementation is :mod:`diloco.torchft.manager`.
"""

from __future__ import annotations

from diloco.torchft.manager import (
    AbandonedBranch,
    ExceptionWithTraceback,
    FencedOut,
    Manager,
    WorldSizeMode,
)

__all__ = [
    "AbandonedBranch",
    "ExceptionWithTraceback",
    "FencedOut",
    "Manager",
    "WorldSizeMode",
]
