"""An emulated Hub, and an executor of it, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.huggingface.executor import HFJobsExecutor
from tests.emulators.huggingface import HuggingFaceHub
from tests.executors.huggingface.world import HuggingFaceWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[HuggingFaceWorld]:
    with HuggingFaceWorld(tmp_path / "hub") as opened:
        yield opened


@pytest.fixture
def hub(world: HuggingFaceWorld) -> HuggingFaceHub:
    return world.hub


@pytest.fixture
def executor(world: HuggingFaceWorld) -> HFJobsExecutor:
    return world.executor()
