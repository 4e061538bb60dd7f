"""What the ranks of one replica say to one another costs: per step, and per exchange.

    python bench/rank_words.py [--ranks 2 4] [--parameters 20e6]

Processes on this machine over gloo, one thread each. A *word* is what each inner step costs;
*write* is the leader's weights into every rank's model, as once per round (in a plain model, as
under DDP; the leader's read says one word more).
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

from diloco.ranks.collective_ops import Operation, Ranks, SharedLayout
from diloco.ranks.command_channel import Channel, Word

BATCHES, WORDS = 20, 100
WRITES = 5


def measure(rank: int, ranks: int, parameters: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    width = int((parameters / 8) ** 0.5)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(8)])
    shared = Ranks(Channel(timeout_s=300.0), model)
    layout = SharedLayout(model, shared)
    for _ in range(100):
        shared.say(Word())
    word_s = float("inf")  # the best of several batches: a busy machine only ever adds
    for _ in range(BATCHES):
        started_s = time.perf_counter()
        for _ in range(WORDS):
            shared.say(Word(tokens=1))
        word_s = min(word_s, (time.perf_counter() - started_s) / WORDS)
    vector = torch.randn(layout.numel)
    write_s = float("inf")
    for _ in range(WRITES):
        started_s = time.perf_counter()
        if rank == 0:
            layout.write(vector)
        else:
            assert shared.say(Word()).operation == Operation.WRITE
            layout.follow_write(None)
        shared.say(Word())
        write_s = min(write_s, time.perf_counter() - started_s)
    if rank == 0:
        print(
            f"{ranks:>5} {word_s * 1e6:>12.0f} {layout.numel:>12,} {write_s * 1e3:>10.0f}"
            f" {4 * layout.numel / write_s / 1e9:>8.2f}",
            flush=True,
        )
    shared.channel.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="What the ranks of one replica say costs.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parameters", type=float, default=20e6)
    arguments = parser.parse_args()
    print("ranks    word (us)   parameters  write (ms)    GB/s")
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (ranks, int(arguments.parameters), str(Path(folder))), nprocs=ranks)


if __name__ == "__main__":
    main()
