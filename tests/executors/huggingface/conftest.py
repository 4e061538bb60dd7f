"""An emulated Hub, and an executor of it, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.huggingface.executor import HFJobsExecutor
from tests.emulators.huggingface import HuggingFaceHub
from tests.executors.huggingface.harness import HuggingFaceHarness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HuggingFaceHarness]:
    with HuggingFaceHarness(tmp_path / "hub") as opened:
        yield opened


@pytest.fixture
def hub(harness: HuggingFaceHarness) -> HuggingFaceHub:
    return harness.hub


@pytest.fixture
def executor(harness: HuggingFaceHarness) -> HFJobsExecutor:
    return harness.executor()
