"""Work units under kills: how often each sample of an epoch is in the committed weights.

Replicas train a small model on token shards with work units, each in a separate process. At random
times one is killed with SIGKILL and a process of its number is started again. The count does not
use the records of the units: each process writes, before each contribution, the samples of its
local progress to a file, and a sample is counted for each commit that includes that contribution.
Ends with status 1 unless every sample of each complete epoch is counted exactly once, and none of
any epoch twice.

Usage: python bench/data_units.py [--replicas 3] [--rounds 40] [--kills 6] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import diloco
from diloco.data.group_units import join_units
from diloco.data.sample_stream import Place, SampleOrder
from diloco.data.shard_index import INDEX, ShardIndex, dtype_of, read_index
from diloco.data.shard_writer import PartWriter
from diloco.protocol import keys
from diloco.protocol.records import Commit
from diloco.store.base import LocalStore, MissingKey
from diloco.training.progress import RoundProgress

CONTEXT = 8
BATCH = 4
STEPS = 5


def write(folder: Path) -> None:
    """Write shards of 640 samples: an epoch of 32 units of one round."""
    store, dtype = LocalStore(folder), dtype_of(60_000)
    writer = PartWriter(store, 0, dtype=dtype, shard_tokens=160 * CONTEXT + 1)
    tokens = 4 * (160 * CONTEXT + 1)
    writer.add(np.arange(tokens).astype(dtype), split="train", ends=True)
    writer.add(np.arange(64).astype(dtype), split="held_out", ends=True)
    part = writer.close()
    index = ShardIndex(
        tokenizer="bytes",
        tokenizer_digest="bytes",
        vocabulary=60_000,
        end=None,
        train=part.train,
        held_out=part.held_out,
    )
    store.put(INDEX, index.to_bytes())


def settings(arguments: argparse.Namespace) -> diloco.GroupSettings:
    return diloco.GroupSettings(
        num_replicas=arguments.replicas,
        max_replicas=2 * arguments.replicas,
        min_quorum=1,
        sync_every=STEPS,
        total_rounds=arguments.rounds,
        batch_size=BATCH,
        warmup_steps=0,
        heartbeat_timeout_s=5.0,
        grace_s=1.0,
    )


class Account:
    """The samples of the local progress, written before each contribution."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.local: list[Place] = []
        self._sent: dict[int, list[Place]] = {}

    def before(self, round: int) -> None:
        self._sent[round] = list(self.local)
        path = self._folder / f"{round}.{self._name}.json"
        path.with_suffix(".tmp").write_text(json.dumps(self.local))
        path.with_suffix(".tmp").rename(path)

    def after(self, progress: RoundProgress) -> None:
        sent = self._sent.pop(progress.round, [])
        if progress.outcome == "included":
            self.local = self.local[len(sent) :]


def replica(folder: Path, number: int) -> None:
    """One process of a replica."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(CONTEXT, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with diloco.join(str(folder / "run"), model, optimizer, replica=number) as group:
        account = Account(folder / "account", str(group.identity.incarnation) + f".{number}")
        index = read_index(LocalStore(folder / "tokens"))
        order = SampleOrder(index, context=CONTEXT, seed=0)
        take = join_units(group, index, order, seed=0)
        group.register_round_hook(before=account.before, after=account.after)
        while not group.done:
            account.local += take(BATCH)
            loss = model(torch.randn(BATCH, CONTEXT)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.02)
            group.step(tokens=BATCH, loss=loss)


def run(folder: Path, arguments: argparse.Namespace) -> int:
    """Run and kill the replicas; return the number of kills."""
    (folder / "account").mkdir()
    diloco.create_group(str(folder / "run"), settings(arguments))
    rng = random.Random(arguments.seed)

    def start(number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--folder", str(folder), "--number", str(number)]
        log = (folder / f"{number}.log").open("ab")
        return subprocess.Popen(command, stderr=log, stdout=log)

    processes = {number: start(number) for number in range(arguments.replicas)}
    kills, last_s = 0, time.monotonic()
    while any(process.poll() is None for process in processes.values()):
        time.sleep(0.2)
        begun = (folder / "run" / "units").exists()
        if not begun or kills >= arguments.kills or time.monotonic() - last_s < arguments.pause_s:
            continue
        last_s = time.monotonic()
        number = rng.choice(sorted(processes))
        if processes[number].poll() is None:
            os.kill(processes[number].pid, signal.SIGKILL)
            processes[number].wait()
            kills += 1
            processes[number] = start(number)
    return kills


def count(folder: Path, rounds: int) -> tuple[Counter[tuple[int, int]], int]:
    """Count the samples of the contributions of all commits, and the commits."""
    store, seen, commits = LocalStore(folder / "run"), Counter[tuple[int, int]](), 0
    for round in range(1, 2 * rounds):
        try:
            commit = Commit.read(store, keys.commit(round))
        except MissingKey:
            break
        commits += 1
        if commit.void:
            continue
        for identity in commit.contributors:
            name = f"{round}.{identity.incarnation}.{identity.replica}.json"
            seen.update(map(tuple, json.loads((folder / "account" / name).read_text())))
    return seen, commits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--pause-s", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        replica(arguments.folder, arguments.number)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "tokens")
        kills = run(folder, arguments)
        seen, commits = count(folder, arguments.rounds)
        samples = 640
        by_epoch: dict[int, Counter[int]] = {}
        for (epoch, _), times in seen.items():
            by_epoch.setdefault(epoch, Counter())[times] += 1
        print(f"{commits} commits, {kills} kills")
        for epoch, times in sorted(by_epoch.items()):
            missing = samples - times.total()
            print(f"epoch {epoch}: {dict(times)} (times seen: samples), {missing} not seen yet")
        twice = any(number > 1 for number in seen.values())
        complete = [e for e in by_epoch if e < max(by_epoch) - 1]
        missed = [e for e in complete if by_epoch[e].total() != samples]
        print(f"seen twice: {'some' if twice else 'none'}; complete epochs with a gap: {missed}")
        return 1 if twice or missed or not complete else 0


if __name__ == "__main__":
    sys.exit(main())
