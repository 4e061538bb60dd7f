"""Hardware and prices of each backend, one file each."""

from __future__ import annotations

import importlib
import importlib.util

from executors.catalogue import Table
from executors.registry import CLASSES


def _tables() -> tuple[Table, ...]:
    """In the order of the registry; a backend without a table has no hardware to choose."""
    modules = [f"executors.{backend}.hardware" for backend in CLASSES]
    return tuple(importlib.import_module(m).TABLE for m in modules if importlib.util.find_spec(m))


TABLES = _tables()
