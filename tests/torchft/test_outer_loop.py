"""The older API: a Manager with a fixed number of ranks, and torchft's DiLoCo with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.diloco.clocks import FastClock
from tests.torchft.wheel import need_torchft

need_torchft()

import diloco  # noqa: E402
from diloco.store.base import LocalStore  # noqa: E402


def train(folder: Path, rank: int) -> nn.Linear:
    store = diloco.ObjectStoreAllReduce("", rank, 2, store=LocalStore(folder))
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    limits: dict[str, Any] = {"clock": FastClock(), "timeout": timedelta(seconds=1000)}
    limits["init_sync"] = False  # the second rank would load the trained state of the first
    manager = diloco.MockManager(
        store, load_state_dict=model.load_state_dict, state_dict=model.state_dict, **limits
    )
    try:
        with diloco.make_diloco_outer_loop(model, inner, outer, 2, manager=manager):
            for _ in range(4):
                model.weight.grad = torch.full((1, 2), 1.0 + 2 * rank)
                inner.step()
    finally:
        manager.shutdown()
    assert manager.current_step() == 2
    return model


def test_two_ranks_train_one_model(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        models = list(pool.map(lambda rank: train(tmp_path, rank), range(2)))
    # Two outer steps; each moves the weights by the mean over gradients 1 and 3: 2 * 0.1 * 2 = 0.4.
    for model in models:
        torch.testing.assert_close(model.weight.data, torch.full((1, 2), 1.0 - 2 * 0.4))
