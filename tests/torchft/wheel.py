"""torchft is there for few platforms: its tests are skipped elsewhere, but never in CI."""

from __future__ import annotations

import importlib.util
import os

import pytest


def need_torchft() -> None:
    """Skip the module that calls this where torchft is not installed."""
    if importlib.util.find_spec("torchft") is None:
        if os.environ.get("CI"):
            raise RuntimeError("expected torchft, found none: CI must run its tests")
        pytest.skip("torchft is not installed", allow_module_level=True)
