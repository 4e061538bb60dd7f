"""The outer learning rate of a run follows its schedule, also when the log is replayed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.protocol.outer_schedule import outer_lr_at
from diloco.protocol.settings import GroupSettings

SETTINGS = GroupSettings(
    num_replicas=1,
    sync_every=2,
    total_rounds=5,
    warmup_steps=0,
    eval_every=0,
    checkpoint_every=100,
    outer_lr=0.5,
    outer_momentum=0.0,
    outer_schedule="cosine",
    outer_warmup_rounds=2,
    outer_min_lr_ratio=0.2,
)


def train(folder: Path, replica: int) -> tuple[Any, list[Tensor]]:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights: list[Tensor] = []
    with diloco.join(
        str(folder),
        model=model,
        inner_optimizer=optimizer,
        replica=replica,
        settings=SETTINGS,
    ) as group:
        weights.append(model.weight.detach().clone())
        group.register_round_hook(after=lambda done: weights.append(model.weight.detach().clone()))
        while not group.done:
            with torch.no_grad():
                model.weight.add_(0.5)
            group.step(tokens=1, loss=1.0)
    return group, weights


def test_each_round_has_its_own_outer_learning_rate(tmp_path: Path) -> None:
    group, weights = train(tmp_path, 0)
    assert group.reason == "completed" and len(weights) == 6
    moved = [float((after - before).mean()) for before, after in pairwise(weights)]
    assert moved == pytest.approx([outer_lr_at(SETTINGS, round) for round in range(1, 6)], rel=1e-5)
    assert moved[0] < moved[1] > moved[2] > moved[3] > moved[4]
    _, replayed = train(tmp_path, 1)
    assert torch.equal(replayed[0], weights[-1])
