"""Fixture of the harnesses in which the contract of every executor is tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executors.harnesses import Harness, open_harness


@pytest.fixture
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A harness selected by :func:`tests.executors.harnesses.every_harness`."""
    folder = tmp_path / "harness"
    folder.mkdir()
    with open_harness(request.param, folder) as harness:
        yield harness
