"""Train data parallel through a bucket: gradients are averaged at every step.

    python examples/train_ddp.py                           two replicas, in a temporary folder
    python examples/train_ddp.py URI REPLICA [--steps N]   one of them, e.g. on two machines

A step counts for all replicas or for none. A restarted replica takes the state of the others, and a
group without live replicas resumes from the bucket. It exchanges at every step, so it needs a fast
bucket: it is the baseline for DiLoCo (train_diloco.py).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from diloco.ddp import DistributedDataParallel
from diloco.manager import Manager

STEPS = 30


def train(uri: str, replica: int, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(replica)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=2,
        use_async_quorum=False,  # a new replica takes the group's state before its first step
        timeout=timedelta(seconds=60),
        replica_id=f"replica-{replica}",
        rendezvous=uri,
    )
    wrapped = DistributedDataParallel(manager, model)
    while manager.current_step() < steps:
        # Data depends on step and replica, so a returning replica continues with the group.
        data = torch.Generator().manual_seed(1000 * manager.current_step() + replica)
        x = torch.randn(32, 4, generator=data)
        manager.start_quorum()
        optimizer.zero_grad()
        loss = (wrapped(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()  # afterwards the gradients are the mean of the replicas
        if manager.should_commit():
            optimizer.step()
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(
        f"replica {replica}: {manager.current_step()} steps, sum of weights {total!r}", flush=True
    )
    manager.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("uri", nargs="?")
    parser.add_argument("replica", nargs="?", type=int)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    if arguments.replica is not None:
        train(arguments.uri, arguments.replica, arguments.steps)
        return 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as uri:
        replicas = [
            context.Process(target=train, args=(uri, number, arguments.steps))
            for number in range(2)
        ]
        for process in replicas:
            process.start()
        for process in replicas:
            process.join()
        return max(process.exitcode or 0 for process in replicas)


if __name__ == "__main__":
    sys.exit(main())
