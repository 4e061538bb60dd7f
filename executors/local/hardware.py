"""This machine."""

from __future__ import annotations

from executors.catalogue import LOCAL as TABLE

__all__ = ["TABLE"]
