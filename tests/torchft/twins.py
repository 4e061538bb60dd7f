"""The same training through two Managers, to be compared step by step.

Two replicas with weights and data of their own go through torchft's loops; what comes out is what
each saw after every step. Everything in it is decided by the inputs, so torchft's real Manager
(Lighthouse, Gloo) and ours must give the same.
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
from torchft.manager import Manager as TheirManager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from diloco import ddp
from diloco.manager import Manager
from tests.torchft.adapter import adapted

STEPS = 12
REPLICAS = 2
Seen = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Training:
    """One of torchft's loops and its options. Both replicas report an error before the commit of
    number ``fails_at``."""

    loop: str
    options: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = False
    fails_at: int = 0


def train(training: Training, replica: int, make: Callable[..., Any]) -> Seen:
    generator = torch.Generator().manual_seed(replica)  # its own weights and data
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
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=10),
    )
    ended = 0
    should_commit = manager.should_commit

    def failing(*arguments: Any, **given: Any) -> bool:
        nonlocal ended
        ended += 1
        if ended == training.fails_at:
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
    seen: Seen = []
    try:
        with context:
            for _ in range(STEPS):
                x = torch.randn(5, 3, generator=generator)
                optimizer.zero_grad()
                (forward(x) - x[:, :2]).square().mean().backward()
                optimizer.step()
                weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
                seen.append((manager.current_step(), manager.batches_committed(), weights.tolist()))
    finally:
        manager.shutdown()
    return seen


def together(training: Training, make: Callable[[int], Callable[..., Any]]) -> list[Seen]:
    with ThreadPoolExecutor(REPLICAS) as pool:
        jobs = [pool.submit(train, training, r, make(r)) for r in range(REPLICAS)]
        return [job.result(timeout=60) for job in jobs]


def copied(values: list[Any], pin_memory: bool) -> list[Any]:
    """torchft sends CPU tensors as they are when the receiver has come for them, by when the sender
    may have trained on; on a GPU, and here, they are copied first."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def theirs(training: Training) -> list[Seen]:
    """Through torchft's Manager."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS)
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
              for _ in range(REPLICAS)]  # fmt: skip

    def make(replica: int) -> Callable[..., Any]:
        def made(**keywords: Any) -> Any:
            return TheirManager(
                pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
                store_addr="localhost",
                store_port=stores[replica].port,
                lighthouse_addr=lighthouse.address(),
                **keywords,
            )

        return made

    try:
        with patch.object(http_transport, "_to_cpu", copied):
            return together(training, make)
    finally:
        lighthouse.shutdown()


def ours(
    training: Training, root: Path, change: Callable[[type[Manager]], type[Manager]] | None = None
) -> list[Seen]:
    """Through ours; ``change`` may break it first."""
    manager = adapted(root)
    manager = change(manager) if change else manager

    def make(replica: int) -> Callable[..., Any]:
        return lambda **keywords: manager(None, lighthouse_addr="host:1", **keywords)  # type: ignore[call-arg]

    return together(training, make)
