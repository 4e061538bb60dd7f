"""A Manager shaped like torchft's (0.2.0), over an object store: change the import, name a bucket.

The public names of :mod:`diloco.torchft.manager`.
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
