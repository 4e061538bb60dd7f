"""Whole tiny runs whose every bit is fixed: prints the digest of the global weights of each.

Weights and gradients are NumPy's, the loss is linear, and the inner learning rate is a power of
two, so that nothing but the exchange and the outer step can differ between machines. Run by
``test_review_golden.py``, alone or under other CPU capabilities: ``python golden_program.py FOLDER
THREADS NAME...``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from diloco.group import join
from diloco.init import create_group
from diloco.model.outer_optimizer import digest
from diloco.protocol import blocks, keys
from diloco.protocol.records import Plan
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from diloco.syncer import Syncer

REPLICAS = 3
SHAPES = {"embedding": (37, 32), "a": (70, 90), "b": (1,), "c": (2, 2500)}
PLANS = ("gather", "sharded", "syncer")

VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"{codec}-{plan}": {"codec": codec, "reduce_plan": plan}
        for codec in ("fp32", "bf16", "int8", "e3m0", "topk")
        for plan in PLANS
    },
    **{f"rda-{plan}": {"merge": "rda", "reduce_plan": plan, "codec": "int8"} for plan in PLANS},
    "fragments": {"num_fragments": 2, "codec": "bf16", "fragment_pattern": "size"},
    "overlap": {"num_fragments": 2, "overlap_steps": 1, "codec": "bf16"},
    "open": {"num_fragments": 2, "overlap_steps": 3, "mixing_alpha": 0.25, "codec": "topk"},
}
"""Of one name, all plans must agree."""


class FastClock:
    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic() * 50

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / 50)


class Odd(nn.Module):
    """12,000 parameters of odd shapes, one an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*SHAPES["embedding"])
        self.layers = nn.ParameterDict(
            {name: torch.empty(SHAPES[name]) for name in ("a", "b", "c")}
        )
        rng = np.random.default_rng(1)
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
                parameter.copy_(torch.from_numpy(drawn))


def linear(model: nn.Module, replica: int, step: int) -> torch.Tensor:
    """Its gradient is what NumPy has drawn for replica and step."""
    rng = np.random.default_rng([2, replica, step])
    total = torch.zeros(())
    for parameter in model.parameters():
        drawn = rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
        total = total + (parameter * torch.from_numpy(drawn)).sum()
    return total


def run(folder: Path, **changes: object) -> str:
    """The digest of the weights at the end of a run of :data:`REPLICAS` replicas."""
    settings = GroupSettings(**{
        "sync_every": 4, "total_rounds": 4, "num_replicas": REPLICAS, "min_quorum": REPLICAS,
        "warmup_steps": 0, "heartbeat_timeout_s": 3600.0, "round_timeout_s": 7200.0,
        "start_wait_s": 3000.0, "grace_s": 3000.0, "eval_every": 0, **changes,
    })  # type: ignore[arg-type]  # fmt: skip
    create_group(str(folder), settings)
    found: list[str] = []

    def train(replica: int) -> None:
        model = Odd()
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7)
        with join(
            str(folder), model=model, inner_optimizer=optimizer, replica=replica,
            heartbeat_interval_s=0.05, clock=FastClock(),
        ) as group:  # fmt: skip
            while not group.done:
                optimizer.zero_grad()
                linear(model, replica, group.data_step).backward()
                optimizer.step()
                group.step(tokens=replica + 1, loss=1.0)
        found.append(digest(torch.cat([p.detach().flatten() for p in model.parameters()])))

    if settings.reduce_plan == "syncer":
        store = LocalStore(folder)
        syncer = Syncer(store, clock=FastClock(), heartbeat_interval_s=0.05)
        threading.Thread(target=syncer.run, daemon=True).start()
        while not store.list(keys.member(settings.max_replicas)):
            pass
    threads = [threading.Thread(target=train, args=(n,), daemon=True) for n in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if len(found) != REPLICAS or len(set(found)) != 1:
        raise RuntimeError(f"expected {REPLICAS} equal digests, found {found}")
    modes = {Plan.from_bytes(LocalStore(folder).get(keys.plan(r))).mode for r in range(1, 5)}
    if settings.reduce_plan != "auto" and modes != {settings.reduce_plan}:
        raise RuntimeError(f"expected rounds by {settings.reduce_plan}, found {sorted(modes)}")
    return found[0]


def main() -> None:
    folder, threads, *names = sys.argv[1:]
    torch.set_num_threads(int(threads))
    blocks.SMALLEST_BLOCK = 4096  # several blocks to share out
    for name in names or VARIANTS:
        print(name, run(Path(folder) / name, weighting="tokens", **VARIANTS[name]), flush=True)


if __name__ == "__main__":
    main()
