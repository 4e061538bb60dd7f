"""Cost of the messages between the ranks of one replica: per step and per exchange.

    python bench/rank_messages.py [--ranks 2 4] [--parameters 20e6]

Processes on this machine over gloo, one thread each. A *message* is what each inner step costs;
*write* is the weights, of which each rank holds a slice, into every rank's model, as once per round
(in a plain model, as under DDP).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from diloco.ranks.collective_ops import Ranks
from diloco.ranks.command_channel import CommandChannel, StepMessage
from diloco.ranks.sliced_layout import SlicedLayout

BATCHES, WORDS = 20, 100
WRITES = 5


def measure(rank: int, ranks: int, parameters: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    width = int((parameters / 8) ** 0.5)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(8)])
    channel, exchange, storage = (CommandChannel(timeout_s=300.0) for _ in range(3))
    ranks_of_replica = Ranks(channel, model, exchange=exchange, storage=storage)
    layout = SlicedLayout(model, channel)
    for _ in range(100):
        ranks_of_replica.all_reduce(StepMessage())
    message_s = float("inf")  # the best of several batches: a busy machine only ever adds
    for _ in range(BATCHES):
        started_s = time.perf_counter()
        for _ in range(WORDS):
            ranks_of_replica.all_reduce(StepMessage(tokens=1))
        message_s = min(message_s, (time.perf_counter() - started_s) / WORDS)
    vector = torch.randn(layout.held_numel)
    write_s = float("inf")
    for _ in range(WRITES):
        started_s = time.perf_counter()
        layout.write(vector)
        ranks_of_replica.all_reduce(StepMessage())
        write_s = min(write_s, time.perf_counter() - started_s)
    if rank == 0:
        print(
            f"{ranks:>5} {message_s * 1e6:>12.0f} {layout.numel:>12,} {write_s * 1e3:>10.0f}"
            f" {4 * layout.numel / write_s / 1e9:>8.2f}",
            flush=True,
        )
    ranks_of_replica.channel.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Cost of the messages between the ranks of one replica."
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parameters", type=float, default=20e6)
    arguments = parser.parse_args()
    print("ranks  message (us)  parameters  write (ms)    GB/s")
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (ranks, int(arguments.parameters), str(Path(folder))), nprocs=ranks)


if __name__ == "__main__":
    main()
