"""Run torchft's DiLoCo over a bucket: a loop written for torchft, with one changed import.

    python examples/train_diloco.py                  two replicas, in a temporary folder
    python examples/train_diloco.py URI REPLICA      one of them, e.g. on two machines

``torchft.local_sgd.DiLoCo`` is unchanged; only the Manager is this library's. It needs torchft
(``pip install '.[torchft]'`` in a clone). ``diloco.join`` (own_loop.py) does not, and it
has more features.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from diloco.manager import Manager  # was: from torchft.manager import Manager

SYNC_EVERY = 10
ROUNDS = 8


def train(uri: str, replica: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(replica)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=2,
        use_async_quorum=False,  # required by torchft's DiLoCo
        timeout=timedelta(seconds=60),
        replica_id=f"replica-{replica}",
        rendezvous=uri,
    )
    data = torch.Generator().manual_seed(replica)
    with DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY):
        while manager.current_step() < ROUNDS:
            x = torch.randn(32, 4, generator=data)
            inner.zero_grad()
            loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            loss.backward()
            inner.step()  # every SYNC_EVERY-th call exchanges through the bucket
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(
        f"replica {replica}: {manager.current_step()} steps, sum of weights {total!r}", flush=True
    )
    manager.shutdown()


def main() -> int:
    if len(sys.argv) == 3:
        train(sys.argv[1], int(sys.argv[2]))
        return 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as uri:
        replicas = [context.Process(target=train, args=(uri, number)) for number in range(2)]
        for process in replicas:
            process.start()
        for process in replicas:
            process.join()
        return max(process.exitcode or 0 for process in replicas)


if __name__ == "__main__":
    sys.exit(main())
