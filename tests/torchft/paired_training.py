"""Run the same training with two Managers, to compare the histories.

Two replicas with different weights and data train with the loops of torchft. The history of a
replica has its step, its committed batches and its weights after every step. It depends on the
inputs only, so torchft's Manager (with Lighthouse and Gloo) and ours must produce the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torchft._torchft import LighthouseServer
from torchft.checkpointing import http_transport
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager as TorchftManager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from diloco import ddp
from diloco.manager import Manager
from tests.torchft.adapter import adapted

STEPS = 12
REPLICAS = 2
History = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Training:
    """A loop of torchft and its options.

    Both replicas report an error before commit number ``fails_at``; 0 means never.
    """

    loop: str
    options: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = False
    fails_at: int = 0


def train(training: Training, replica: int, make: Callable[..., Any]) -> History:
    generator = torch.Generator().manual_seed(replica)  # different weights and data per replica
    fragments = [nn.Linear(3, 4), nn.Linear(4, 2)]
    model = nn.Sequential(fragments[0], nn.Tanh(), fragments[1])
    for parameter in model.parameters():
        parameter.data.uniform_(-1, 1, generator=generator)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = make(
        min_replica_size=REPLICAS,
        load_state_dict=load,
        state_dict=save,
        use_async_quorum=training.asynchronous,
        replica_id=str(replica),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=120),
        quorum_timeout=timedelta(seconds=120),
    )
    commits = 0
    should_commit = manager.should_commit

    def failing(*arguments: Any, **given: Any) -> bool:
        nonlocal commits
        commits += 1
        if commits == training.fails_at:
            manager.report_error(RuntimeError("injected"))
        return bool(should_commit(*arguments, **given))

    manager.should_commit = failing
    context: Any = nullcontext()
    optimizer: torch.optim.Optimizer = inner
    forward: nn.Module = model
    if training.loop == "ddp":
        forward, optimizer = (
            DistributedDataParallel(manager, model),
            OptimizerWrapper(manager, inner),
        )
    elif training.loop in ("our ddp", "our pure ddp"):
        wrapper = (
            ddp.DistributedDataParallel
            if training.loop == "our ddp"
            else ddp.PureDistributedDataParallel
        )
        forward, optimizer = wrapper(manager, model), OptimizerWrapper(manager, inner)
    elif training.loop == "local_sgd":
        context = LocalSGD(manager, model, inner, sync_every=2)
    else:
        outer = [
            torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            for part in fragments
        ]
        context = DiLoCo(manager, fragments, inner, outer, **training.options)
    history: History = []
    try:
        with context:
            for _ in range(STEPS):
                x = torch.randn(5, 3, generator=generator)
                optimizer.zero_grad()
                (forward(x) - x[:, :2]).square().mean().backward()
                optimizer.step()
                weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
                history.append(
                    (manager.current_step(), manager.batches_committed(), weights.tolist())
                )
    finally:
        manager.shutdown()
    return history


def train_replicas(training: Training, make: Callable[[int], Callable[..., Any]]) -> list[History]:
    with ThreadPoolExecutor(REPLICAS) as pool:
        jobs = [pool.submit(train, training, r, make(r)) for r in range(REPLICAS)]
        return [job.result(timeout=600) for job in jobs]


def copied(values: list[Any], pin_memory: bool) -> list[Any]:
    """Copy the state before it is sent.

    torchft sends CPU tensors without a copy, and the sender can change them before the receiver
    fetches them. GPU tensors are copied by torchft itself.
    """
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def train_with_torchft(training: Training) -> list[History]:
    """Train with torchft's Manager."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS)
    stores = [
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for _ in range(REPLICAS)
    ]

    def make(replica: int) -> Callable[..., Any]:
        def new_manager(**keywords: Any) -> Any:
            return TorchftManager(
                pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
                store_addr="localhost",
                store_port=stores[replica].port,
                lighthouse_addr=lighthouse.address(),
                **keywords,
            )

        return new_manager

    try:
        with patch.object(http_transport, "_to_cpu", copied):
            return train_replicas(training, make)
    finally:
        lighthouse.shutdown()


def train_with_archipelago(
    training: Training, root: Path, change: Callable[[type[Manager]], type[Manager]] | None = None
) -> list[History]:
    """Train with our Manager; ``change`` derives a class from it, e.g. a broken one."""
    manager = adapted(root)
    manager = change(manager) if change else manager

    def make(replica: int) -> Callable[..., Any]:
        return lambda **keywords: manager(None, lighthouse_addr="host:1", **keywords)  # type: ignore[call-arg]

    return train_replicas(training, make)
