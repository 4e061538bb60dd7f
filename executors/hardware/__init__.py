"""Hardware and prices of each backend, one file each."""

from __future__ import annotations

import importlib
import importlib.util

from executors.catalogue import Table
from executors.registry import CLASSES


def _table(backend: str) -> Table:
    table = importlib.import_module(f"executors.hardware.{backend}").TABLE
    assert isinstance(table, Table)
    return table


TABLES = tuple(
    _table(backend) for backend in CLASSES if importlib.util.find_spec(f"{__name__}.{backend}")
)
"""In the order of the registry."""
