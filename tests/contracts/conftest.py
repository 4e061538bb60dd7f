"""The worlds that the suite of every executor runs in: see ``tests/executors/worlds.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executors.worlds import World, open_world


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """One of the worlds that :func:`tests.executors.worlds.every_world` names."""
    folder = tmp_path / "world"
    folder.mkdir()
    with open_world(request.param, folder) as opened:
        yield opened
