"""The exchange of one replica as one process and as several ranks: time and memory.

    python bench/rank_exchange.py [--ranks 1 2 4] [--parameters 50e6] [--codec bf16]

Processes on this machine over gloo, one thread each, with a plain model in each of them, as under
DDP; a group of one replica on a local folder, without overlap. *Exchange* is the fastest step that
ends a round: drift, encode, upload, read back, plan, reduce, commit, outer step, the new weights
in every rank's model. *Memory* is the highest resident memory of such a step above that before it
joined, which excludes the model. The first rank is the leader.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
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

LAYERS = 12
ROUNDS = 4


def replica(rank: int, ranks: int, parameters: int, folder: str) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
        )
    width = int((parameters / LAYERS) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = resident("VmRSS")
    seconds, peaks = [], []
    with diloco.join(f"{folder}/run", replica=0, model=model, inner_optimizer=optimizer) as group:
        held = resident("VmRSS") - before
        for _ in range(ROUNDS - 1):  # the last round also writes the result
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999)
            reset_peak()
            if ranks > 1:
                dist.barrier()
            started_s = time.perf_counter()
            group.step(tokens=1, loss=1.0)
            seconds.append(time.perf_counter() - started_s)
            peaks.append(resident("VmHWM") - before)
        group.leave()
        group.step(tokens=1, loss=1.0)
    result = {
        "numel": sum(parameter.numel() for parameter in model.parameters()),
        "held": held,
        "peak": min(peaks),
        "seconds": min(seconds),
    }
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))
    if ranks > 1:
        dist.destroy_process_group()


def measure(ranks: int, parameters: int, codec: str) -> list[dict[str, Any]]:
    folder = tempfile.mkdtemp()
    try:
        settings = GroupSettings(
            num_replicas=1,
            sync_every=1,
            total_rounds=100,
            codec=codec,
            warmup_steps=0,
            eval_every=0,
            checkpoint_every=1000,
        )
        create_group(f"{folder}/run", settings)
        mp.spawn(replica, (ranks, parameters, folder), nprocs=ranks)
        files = [Path(f"{folder}/{rank}.json") for rank in range(ranks)]
        return [json.loads(file.read_text()) for file in files]
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="The exchange of one replica of several ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--codec", default="bf16")
    arguments = parser.parse_args()
    print("| ranks | parameters | exchange | memory of the leader | of the other ranks |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for ranks in arguments.ranks:
        results = measure(ranks, int(arguments.parameters), arguments.codec)
        peaks = [f"{result['peak'] / 2**20:,.0f} MiB" for result in results]
        others = ", ".join(peaks[1:]) or "-"
        slowest_s = max(result["seconds"] for result in results)
        print(
            f"| {ranks} | {results[0]['numel']:,} | {slowest_s:.2f} s | {peaks[0]} | {others} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
