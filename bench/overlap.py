"""How much of the wall time replicas wait for the exchange, with overlap and without.

Replicas are processes that join a group as any training loop does. A step of compute is a sleep,
as on a GPU that leaves the CPU free; the model has 2.8M parameters, or ``--numel``. Sync-wait is
what the training loop was held up for by exchanges: with overlap the *wait* of its round reports,
without it encoding, uploading, waiting, downloading and reducing. *In step()* is all that
:meth:`~diloco.group.Group.step` took, with what no overlap hides: reading the weights, the outer
step, writing the weights. Both are of the time from round :data:`WARM_UP` on.

Usage: python bench/overlap.py [--store file|s3|URI] [--replicas 2] [--tau 0 5 10 25 49]
       [--sync-every 50] [--step-s 0.02] [--rounds 8] [--numel 2800080]
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
from torch import nn

from bench.support.processes import in_processes, meet, somewhere
from bench.support.segments import every_segment
from diloco.group import join
from diloco.init import create_group
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import RoundReport, Segment
from diloco.store.open import open_store

WARM_UP = 2
SYNC = ("encode", "upload", "wait", "download", "reduce")


def train(number: int, uri: str, numel: int, step_s: float) -> float:
    """The share of the time that was spent in ``group.step``, percent."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    model = nn.Linear(numel // 16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    meet()
    begin, inside = time.monotonic(), 0.0
    with join(uri, model=model, inner_optimizer=optimizer, replica=number) as group:
        while not group.done:
            time.sleep(step_s)
            with torch.no_grad():
                model.weight.flatten()[:1000].add_(0.001 * (number + 1))
            called, warm = time.monotonic(), group.round > WARM_UP
            group.step(tokens=1, loss=1.0)
            if not warm:
                begin = time.monotonic()
            elif not group.done:  # the end of the run is no exchange
                inside += time.monotonic() - called
                end = time.monotonic()
    return 100 * inside / (end - begin)


@dataclass(frozen=True)
class Shares:
    """Of wall time, percent; ``exchange_s`` is how long an exchange took, in the background too."""

    wait: float
    step: float
    exchange_s: float


def shares(reports: list[RoundReport], *, step: float) -> Shares:
    settled = [report for report in reports if report.round > WARM_UP]
    total = sum(sum(report.phases.values()) for report in settled)

    wait = sum(report.phases.get(name, 0.0) for report in settled for name in SYNC)
    exchanges = [
        sum((report.background or report.phases).get(name, 0.0) for name in SYNC)
        for report in settled
    ]
    return Shares(100 * wait / total, step, statistics.median(exchanges))


def measure(uri: str, given: argparse.Namespace, tau: int) -> Shares:
    where = f"{uri.rstrip('/')}/{uuid.uuid4().hex}"
    settings = GroupSettings(
        sync_every=given.sync_every,
        total_rounds=given.rounds,
        overlap_steps=tau,
        warmup_steps=0,
        num_replicas=given.replicas,
        eval_every=0,
        state_every=0,
        checkpoint_every=1000,
    )
    create_group(where, settings)
    each = [(number, where, given.numel, given.step_s) for number in range(given.replicas)]
    inside = statistics.mean(in_processes(train, each))
    store = open_store(where)
    segments = list(map(Segment.from_bytes, every_segment(store)))
    return shares([report for segment in segments for report in segment.rounds], step=inside)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="file", help="file, s3 (starts a server), or a URI")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tau", type=int, nargs="+", default=[0, 5, 10, 25, 49])
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--numel", type=int, default=2_800_080)
    given = parser.parse_args()
    print(
        f"{given.replicas} replicas, {given.numel:,} parameters, H = {given.sync_every} steps of "
        f"{1000 * given.step_s:.0f} ms\n"
    )
    print("| tau | covers, s | exchange, s | sync-wait | in step() |")
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    with somewhere(given.store) as uri:
        for tau in given.tau:
            found = measure(uri, given, tau)
            print(
                f"| {tau} | {tau * given.step_s:.2f} | {found.exchange_s:.2f} "
                f"| **{found.wait:.1f} %** | {found.step:.1f} % |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
