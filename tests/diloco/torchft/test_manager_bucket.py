"""Managers over a real S3 server: the same decisions, with its atomic create."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diloco.store.open import open_store
from tests.diloco.manager_harness import Harness

pytestmark = pytest.mark.processes


def test_a_group_over_s3(s3_uri: str, tmp_path: Path) -> None:
    harness = Harness(tmp_path)

    def member(replica: int) -> Callable[[], list[float]]:
        def run() -> list[float]:
            weight = torch.tensor([float(replica)])
            manager = harness.make(
                replica,
                store=open_store(s3_uri),
                min_replica_size=3,
                load_state_dict=lambda state: weight.copy_(state["weight"]),
                state_dict=lambda: {"weight": weight},
            )
            for _ in range(3):
                manager.start_quorum()
                mean = torch.tensor([float(replica)])
                manager.allreduce(mean).wait()
                assert manager.should_commit(), manager.errored()
                weight -= mean
            return [manager.current_step(), weight.item()]

        return run

    try:
        assert harness.together(*(member(replica) for replica in range(3))) == [[3, -3.0]] * 3
    finally:
        harness.close()
