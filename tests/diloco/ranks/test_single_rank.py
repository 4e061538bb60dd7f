"""FSDP2 on a single rank: the program of several ranks, tried on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from bench.support.segments import every_segment
from diloco.group import join
from diloco.init import create_group
from diloco.model.named_parameters import is_sharded
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Segment
from diloco.store.base import LocalStore


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_norm_is_reported(tmp_path: Path) -> None:
    create_group(
        str(tmp_path), GroupSettings(num_replicas=1, sync_every=2, total_rounds=2, warmup_steps=0)
    )
    model = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with join(str(tmp_path), model=model, inner_optimizer=optimizer, replica=0) as group:
        while not group.done:
            loss = model(torch.ones(3, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert is_sharded(norm)
            norms.append(float(norm.full_tensor()))  # type: ignore[attr-defined]
            group.step(tokens=3, loss=loss, grad_norm=norm)
    segments = map(Segment.from_bytes, every_segment(LocalStore(tmp_path)))
    reported = [norm for segment in segments for norm in segment.steps.grad_norm]
    assert reported == pytest.approx(norms)
    assert len(norms) == 4
