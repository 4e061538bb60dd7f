"""How long checkpoints and saved states stop training, as a share of a round; their peak memory.

Replicas are processes that join a group as any training loop does, with AdamW and a payload of each
other replica in every round. A step of compute is a sleep, as on a GPU that leaves the CPU free.
The same rounds are trained without any save, with the default intervals, and with both saves in
every round. *In step()* is the time of :meth:`~diloco.group.Group.step` in a round, which includes
the exchange, and *CPU* that of the training thread alone. The stall is their difference from the
rounds without saves. *Growth* is the peak of the resident set (VmHWM) beyond local and global
weights, outer momentum and AdamW's moments, in models of fp32.

A model with twice the parameters stalls twice as long: compare the length of a round for each
million of parameters.

Usage: python bench/training_stall.py [--store memory|file|s3|URI] [--numel N] [--replicas 2]
       [--round-s 10] [--rounds 10]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.support.memory import reset_peak, resident, trained_model
from bench.support.processes import in_memory, in_processes, meet, somewhere
from diloco.group import join
from diloco.init import create_group
from diloco.protocol.settings import GroupSettings

NEVER = 10**6
EVERY = {"nothing": (NEVER, 0), "every 5 rounds (default)": (5, 5), "every round": (1, 1)}
"""Rounds between checkpoints and between saved states."""
WARM_UP, STEPS, TENSORS = 2, 4, 16


@dataclass(frozen=True)
class Result:
    """Seconds of a round, those in ``group.step`` and the training thread's CPU time there; bytes
    beyond the training state."""

    round_s: float
    inside_s: float
    cpu_s: float
    grown: int


def train(number: int, uri: str, numel: int, round_s: float, rounds: int) -> Result:
    torch.set_num_threads(1)
    model, optimizer = trained_model(numel, TENSORS)
    before = reset_peak()
    meet()
    begin_s = end_s = inside_s = cpu_s = 0.0
    grown = 0
    with join(uri, model=model, inner_optimizer=optimizer, replica=number) as group:
        while not group.done:
            time.sleep(round_s / STEPS)
            with torch.no_grad():
                for parameter in model:
                    parameter.mul_(1.0001)
            called_s, called_cpu_s = time.monotonic(), time.thread_time()
            counts = WARM_UP < group.round <= WARM_UP + rounds
            group.step(tokens=1, loss=1.0)
            if counts:
                inside_s += time.monotonic() - called_s
                cpu_s += time.thread_time() - called_cpu_s
                end_s = time.monotonic()
                grown = resident("VmHWM") - before - 2 * 4 * numel  # global weights, momentum
            elif group.round == WARM_UP + 1 and not begin_s:
                begin_s = time.monotonic()
    return Result((end_s - begin_s) / rounds, inside_s / rounds, cpu_s / rounds, grown)


def measure(uri: str, given: argparse.Namespace) -> None:
    print("| saved | round, s | in step(), s | CPU, s | stall, s | CPU, s | of a round | growth |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    without: tuple[float, float] | None = None
    for name, (checkpoint_every, state_every) in EVERY.items():
        where = f"{uri.rstrip('/')}/{uuid.uuid4().hex}"
        settings = GroupSettings(
            num_replicas=given.replicas,
            min_quorum=given.replicas,
            sync_every=STEPS,
            total_rounds=WARM_UP + given.rounds + 1,
            codec="bf16",
            checkpoint_every=checkpoint_every,
            state_every=state_every,
            eval_every=0,
            warmup_steps=0,
        )
        create_group(where, settings)
        each = (where, given.numel, given.round_s, given.rounds)
        results = in_processes(train, [(n, *each) for n in range(given.replicas)])
        round_s = statistics.mean(result.round_s for result in results)
        inside_s = statistics.mean(result.inside_s for result in results)
        cpu_s = statistics.mean(result.cpu_s for result in results)
        without = without or (inside_s, cpu_s)
        stall_s, stall_cpu_s = inside_s - without[0], cpu_s - without[1]
        grown = max(result.grown for result in results) / (4 * given.numel)
        print(
            f"| {name} | {round_s:.2f} | {inside_s:.2f} | {cpu_s:.2f} | {stall_s:.3f} "
            f"| {stall_cpu_s:.3f} | {100 * stall_s / round_s:.2f} % | {grown:.2f} |",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="memory", help="memory, file, s3 (starts a server), URI")
    parser.add_argument("--numel", type=int, default=2**22)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--round-s", type=float, default=10.0, help="computation of a round")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that are measured")
    given = parser.parse_args()
    with in_memory() if given.store == "memory" else somewhere(given.store) as uri:
        measure(uri, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
