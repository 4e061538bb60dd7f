"""The backend ``nohup`` in the contract suite."""

from __future__ import annotations

from typing import Any

from archipelago_nohup.executor import NohupExecutor
from tests.executors.harnesses import config
from tests.executors.local.harness import LocalHarness


class NohupHarness(LocalHarness):
    backend = "nohup"

    def executor(self, **options: Any) -> NohupExecutor:
        return NohupExecutor(config(self.folder, **{"grace_s": 0.5, **options}))


HARNESS = NohupHarness
