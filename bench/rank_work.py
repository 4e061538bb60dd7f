"""The work of each rank of one replica: CPU time, bytes to and from the store, memory.

    python bench/rank_work.py [--ranks 4] [--parameters 50e6] [--case gather sharded ...]

Processes on this machine over gloo, one thread each, with a plain model and AdamW in each of them,
as under DDP; a group of one replica on a local folder, without overlap. A case is one setting:

- ``gather``, ``sharded``, ``rda``: a round of that plan or merge; ``sharded`` beside a replica of
  one process, which is not shown;
- ``checkpoint``, ``state``: a gathered round after which a checkpoint, or the replica state, is
  written;
- ``start``: checkpoint 0 is written and read; ``resume``: another process of the replica reads the
  checkpoint and the replica state; ``final``: the final weights are written.

*CPU* is user and system time of the process, threads included. *Memory* is the highest resident
memory in the case above that before it began. The first rank is the leader.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import diloco
from bench.support.memory import reset_peak, resident
from diloco.init import create_group
from diloco.protocol.settings import GroupSettings
from diloco.store.metered import MeteredStore, StoreUsage

LAYERS = 12
CASES = ("start", "gather", "sharded", "rda", "checkpoint", "state", "resume", "final")


class Meter:
    """Measures this process in a block."""

    def __init__(self) -> None:
        self.stores: list[MeteredStore] = []
        self.results: dict[str, dict[str, float]] = {}
        meter, created = self, MeteredStore.__init__

        def init(store: MeteredStore, *arguments: Any) -> None:
            created(store, *arguments)
            meter.stores.append(store)

        MeteredStore.__init__ = init  # type: ignore[method-assign]
        MeteredStore.add = lambda store, usage: None  # type: ignore[method-assign]

    @contextmanager
    def measured(self, case: str) -> Iterator[None]:
        before, up, down = _cpu_s(), *self._bytes()
        held = resident("VmRSS")
        reset_peak()
        yield
        now_up, now_down = self._bytes()
        self.results[case] = {
            "cpu_s": _cpu_s() - before,
            "up": now_up - up,
            "down": now_down - down,
            "peak": resident("VmHWM") - held,
        }

    def _bytes(self) -> tuple[int, int]:
        usages: list[StoreUsage] = [store.usage for store in self.stores]
        return sum(u.bytes_up for u in usages), sum(u.bytes_down for u in usages)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def replica(rank: int, ranks: int, parameters: int, folder: str, case: str, attempt: int) -> None:
    torch.set_num_threads(1)
    is_peer = rank == ranks
    if is_peer:
        ranks = 1
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet.{attempt}",
            rank=rank,
            world_size=ranks,
        )
    meter = Meter()
    width = int((parameters / LAYERS) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()
        optimizer.zero_grad()

    with meter.measured("resume" if attempt else "start"):
        group = diloco.join(
            f"{folder}/run", replica=int(is_peer), model=model, inner_optimizer=optimizer
        ).__enter__()
        if ranks > 1:
            dist.barrier()
    for index in range(0 if attempt else 3):
        train()
        if ranks > 1:
            dist.barrier()
        with meter.measured(case if index == 1 else "other"):
            group.step(tokens=1, loss=1.0)
            finish_writes(group)
            if ranks > 1:
                dist.barrier()
    with meter.measured("final" if attempt else "other"):
        if attempt:
            train()
            group.step(tokens=1, loss=1.0)
        group.__exit__(None, None, None)
    Path(f"{folder}/{rank}.{attempt}.json").write_text(json.dumps(meter.results))
    if ranks > 1:
        dist.destroy_process_group()


def finish_writes(group: Any) -> None:
    """Wait for the writes in the background, on the leader."""
    if hasattr(group, "_loop"):
        group._loop.tasks.finish_checkpoint()
        group._loop.tasks.finish_state()


def measure(ranks: int, parameters: int, case: str) -> list[dict[str, dict[str, float]]]:
    """Run the group twice: three rounds, and in another process the fourth and last one."""
    folder = tempfile.mkdtemp()
    replicas = 2 if case == "sharded" else 1
    try:
        settings = GroupSettings(
            num_replicas=replicas,
            min_quorum=replicas,
            sync_every=1,
            total_rounds=4,
            codec="bf16",
            merge="rda" if case == "rda" else "mean",
            reduce_plan="sharded" if case == "sharded" else "gather",
            warmup_steps=0,
            eval_every=0,
            checkpoint_every=1 if case == "checkpoint" else 3,
            state_every=1 if case == "state" else 0,
        )
        create_group(f"{folder}/run", settings)
        results: list[dict[str, dict[str, float]]] = [{} for _ in range(ranks)]
        for attempt in range(2):
            mp.spawn(
                replica, (ranks, parameters, folder, case, attempt), nprocs=ranks + replicas - 1
            )
            for rank, result in enumerate(results):
                result |= json.loads(Path(f"{folder}/{rank}.{attempt}.json").read_text())
        return results
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="The work of each rank of one replica.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES)
    arguments = parser.parse_args()
    print("| case | rank | CPU | up | down | memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    wanted = [case for case in CASES if case in arguments.case]
    rounds = [
        case for case in wanted if case in ("gather", "sharded", "rda", "checkpoint", "state")
    ]
    for case in rounds or ["gather"]:
        results = measure(arguments.ranks, int(arguments.parameters), case)
        shown = [case] if case in wanted else []
        if case == (rounds or ["gather"])[0]:
            shown += [name for name in ("start", "resume", "final") if name in wanted]
        for name in shown:
            for rank, result in enumerate(results):
                print(_row(name, rank, **result[name]), flush=True)


def _row(case: str, rank: int, *, cpu_s: float, up: float, down: float, peak: float) -> str:
    megabytes = " | ".join(f"{value / 1e6:,.0f} MB" for value in (up, down, peak))
    return f"| {case} | {rank} | {cpu_s:.1f} s | {megabytes} |"


if __name__ == "__main__":
    main()
