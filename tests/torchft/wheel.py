"""torchft has wheels for few platforms: its tests are skipped elsewhere, except in CI."""

from __future__ import annotations

import importlib.util
import os

import pytest


def need_torchft() -> None:
    """Skip the calling module if torchft is not installed."""
    if importlib.util.find_spec("torchft") is None:
        if os.environ.get("CI"):
            raise RuntimeError("expected torchft, found none: CI must run its tests")
        pytest.skip("torchft is not installed", allow_module_level=True)
