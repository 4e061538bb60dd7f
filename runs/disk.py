"""Free disk space of the state folder, which holds the embedded broker, SQLite and logs."""

from __future__ import annotations

import shutil
from pathlib import Path

FULL_BYTES = 20_000_000
"""With less free space than this, the broker and the database can fail to write."""


def free_bytes(folder: Path) -> int:
    """Free space of the file system that holds ``folder``."""
    return shutil.disk_usage(folder).free


def disk_state(folder: Path) -> str:
    """``ok``, or a short description of the problem."""
    try:
        free = free_bytes(folder)
    except OSError as error:
        return f"unknown: {error.strerror}"
    return "ok" if free >= FULL_BYTES else f"full: {free / 1e6:.0f} MB free"
