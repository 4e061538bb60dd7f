"""Train your own model in your own loop: two processes that share only a folder.

    python examples/own_loop.py                  both processes, in a temporary folder
    python examples/own_loop.py URI REPLICA      one of them, in an existing group

Each process trains on its own data; every 20 steps they exchange pseudo-gradients through the
rendezvous. With a bucket instead of the folder they can run on two machines without other changes.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile

import torch
from torch import nn

import diloco

TRUE_WEIGHTS = torch.tensor([[2.0, -1.0, 0.5, 3.0]])


def train(uri: str, replica: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(replica)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    data = torch.Generator().manual_seed(replica)
    with diloco.join(uri, replica=replica, model=model, inner_optimizer=optimizer) as group:
        while not group.done:
            x = torch.randn(32, 4, generator=data)
            loss = (model(x) - x @ TRUE_WEIGHTS.T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            group.step(tokens=len(x), loss=loss)
    weights = [round(value, 3) for value in model.weight.flatten().tolist()]
    print(f"replica {replica}: {group.reason}, weights {weights}", flush=True)


def main() -> int:
    if len(sys.argv) == 3:
        train(sys.argv[1], int(sys.argv[2]))
        return 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as uri:
        settings = diloco.GroupSettings(
            num_replicas=2, sync_every=20, total_rounds=40, warmup_steps=0, eval_every=0
        )
        diloco.create_group(uri, settings)
        replicas = [context.Process(target=train, args=(uri, number)) for number in range(2)]
        for process in replicas:
            process.start()
        for process in replicas:
            process.join()
        return max(process.exitcode or 0 for process in replicas)


if __name__ == "__main__":
    sys.exit(main())
