"""hivemind beside this library: the same model, data and number of averagings on two replicas each.

Both train the demo model with AdamW on the standard library's source, each replica on its half.
*hivemind* averages the weights of its peers (``hivemind.Optimizer`` with local updates) over
libp2p. *mean* is the same rule here, through a folder: outer learning rate 1, no momentum; *DiLoCo*
is the default rule. *exact mean* is the rule without any library, both replicas in one process, and
*alone* the same without an average.

Columns: held-out loss of the final weights, and steps, of both replicas (peers go on training while
they look for each other); averagings of both together; for each averaging the seconds by which
steps were longer than their median, and the CPU seconds of all processes of a replica beyond the
median step.

Usage: python bench/peers.py [--rounds 8] [--every 50], in an environment with hivemind:
    pip install ".[torch]" psutil hivemind==1.1.12
Without hivemind it measures the others, and prints a notice.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

import diloco
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.workload import ByteGPTWorkload
from diloco.workloads import load_workload

ROOT = Path(__file__).resolve().parent.parent
BATCH = 4
RULES: Mapping[str, Mapping[str, Any]] = {
    "mean": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "DiLoCo": {},
}
TOGETHER = "Averaged parameters with 2 peers"
"""Line of hivemind's log."""


def cpu_s() -> float:
    """CPU seconds of this process and its children."""
    own = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (own, *own.children(recursive=True)))


@dataclass
class Meter:
    """Times of the steps of a replica."""

    begun_cpu_s: float = field(default_factory=cpu_s)
    wall_s: list[float] = field(default_factory=list)
    thread_s: list[float] = field(default_factory=list)

    def step(self, work: Callable[[], None]) -> None:
        wall_s, thread_s = time.perf_counter(), time.thread_time()
        work()
        self.wall_s.append(time.perf_counter() - wall_s)
        self.thread_s.append(time.thread_time() - thread_s)

    def figures(self) -> dict[str, float]:
        usual_s = statistics.median(self.wall_s)
        steps_s = statistics.median(self.thread_s) * len(self.thread_s)
        return {
            "steps": len(self.wall_s),
            "waited_s": sum(max(0.0, each - usual_s) for each in self.wall_s),
            "cpu_s": cpu_s() - self.begun_cpu_s - steps_s,
        }


def settings_of(system: str, *, rounds: int, every: int) -> diloco.GroupSettings:
    return diloco.GroupSettings(
        num_replicas=2, max_replicas=2, start_replicas=2, sync_every=every, total_rounds=rounds,
        batch_size=BATCH, warmup_steps=0, **RULES.get(system, {}),
    )  # fmt: skip


def load_training(settings: diloco.GroupSettings, replica: int) -> Any:
    """The model and the data of a replica."""
    workload = ByteGPTWorkload(eval_bytes=32_768).to_dict()
    document = GroupDocument.new(settings, workload=workload)
    return load_workload(document, replica=replica, device="cpu")


def reference(name: str, *, rounds: int, every: int) -> None:
    """Train both replicas in this process, and print the row. Without a library no time is lost."""
    torch.set_num_threads(1)
    settings = settings_of("mean", rounds=rounds, every=every)
    replicas = [load_training(settings, number) for number in range(2)]
    models = [replica.build_model() for replica in replicas]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models]
    for step in range(rounds * every):
        for replica, model, optimizer in zip(replicas, models, optimizers, strict=True):
            loss = replica.loss(model, replica.train_batch(step))
            model.zero_grad()
            loss.backward()
            optimizer.step()
        if name == "exact mean" and (step + 1) % every == 0:
            with torch.no_grad():
                for one, other in zip(*(model.parameters() for model in models), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    pairs = zip(replicas, models, strict=True)
    losses = ", ".join(f"{replica.evaluate(model).loss:.3f}" for replica, model in pairs)
    steps = f"{rounds * every}, {rounds * every}"
    averagings = rounds if name == "exact mean" else 0
    print(f"{name:>10} {losses:>14} {steps:>10} {averagings:>10.0f}", flush=True)


def train(system: str, replica: int, place: str, *, rounds: int, every: int) -> None:
    """Child process: train one replica and print its figures."""
    torch.set_num_threads(1)
    settings = settings_of(system, rounds=rounds, every=every)
    training = load_training(settings, replica)
    model = training.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def backward(step: int) -> torch.Tensor:
        loss: torch.Tensor = training.loss(model, training.train_batch(step))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    run = _with_hivemind if system == "hivemind" else _in_group
    figures = run(backward, model, optimizer, place, replica, settings)
    print(json.dumps(figures | {"loss": training.evaluate(model).loss}), flush=True)


def _in_group(
    backward: Any, model: Any, optimizer: Any, place: str, replica: int, settings: Any
) -> dict[str, float]:
    with diloco.join(place, model, optimizer, replica=replica, settings=settings) as group:
        meter = Meter()

        def step() -> None:
            loss = backward(group.data_step)
            optimizer.step()
            group.step(tokens=BATCH * 128, loss=loss)

        while not group.done:
            meter.step(step)
        return meter.figures() | {"averagings": float(settings.total_rounds)}


def _with_hivemind(
    backward: Any, model: Any, optimizer: Any, place: str, replica: int, settings: Any
) -> dict[str, float]:
    hivemind: Any = importlib.import_module("hivemind")
    address = Path(place) / "address"
    while replica and not address.exists():
        time.sleep(0.1)
    peers = [address.read_text()] if replica else []
    dht = hivemind.DHT(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=peers, use_ipfs=False, start=True
    )
    if not replica:
        address.with_name("new").write_text(str(dht.get_visible_maddrs()[0]))
        address.with_name("new").rename(address)
    averaged = hivemind.Optimizer(
        dht=dht, run_id="peers", optimizer=optimizer, use_local_updates=True,
        batch_size_per_step=BATCH, target_batch_size=2 * BATCH * settings.sync_every,
        matchmaking_time=3.0, averaging_timeout=30.0, verbose=True,
    )  # fmt: skip
    (Path(place) / f"ready-{replica}").touch()
    while not (Path(place) / f"ready-{1 - replica}").exists():
        time.sleep(0.1)
    meter = Meter()
    steps = itertools.count()

    def step() -> None:
        backward(next(steps))
        averaged.step()

    while averaged.local_epoch < settings.total_rounds:
        meter.step(step)
    figures = meter.figures()
    (Path(place) / f"done-{replica}").touch()
    while not (Path(place) / f"done-{1 - replica}").exists():
        time.sleep(0.1)
    averaged.shutdown()
    dht.shutdown()
    return figures


def compare(system: str, *, rounds: int, every: int) -> None:
    """Train with one system in two processes, and print its row."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--rounds", str(rounds), "--every", str(every), "--place", folder]
        command = [sys.executable, __file__, *options, "--system", system, "--replica"]
        logs = [Path(folder) / f"log-{number}" for number in range(2)]
        replicas = [
            subprocess.Popen(
                [*command, str(number)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=log.open("w"),  # not a pipe, which children of hivemind can hold open
                stderr=subprocess.STDOUT,
            )
            for number, log in enumerate(logs)
        ]
        codes = [replica.wait() for replica in replicas]
        output = [log.read_text() for log in logs]
    if any(codes):
        raise RuntimeError(f"{system}: expected status 0, found {codes}: {output}")
    both = [
        json.loads(next(line for line in text.splitlines() if line.startswith('{"steps"')))
        for text in output
    ]
    averagings = both[0].get("averagings") or output[0].count(TOGETHER)
    losses = ", ".join(f"{each['loss']:.3f}" for each in both)
    per = [
        sum(each[name] for each in both) / 2 / max(1, averagings) for name in ("waited_s", "cpu_s")
    ]
    steps = ", ".join(f"{each['steps']:.0f}" for each in both)
    waited_s, used_s = per
    row = f"{system:>10} {losses:>14} {steps:>10} {averagings:>10.0f}"
    print(f"{row} {waited_s:>10.2f} {used_s:>8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--replica", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--place", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = {"rounds": given.rounds, "every": given.every}
    if given.system:
        train(given.system, given.replica, given.place, **sizes)
        return
    print(f"{'':>10} {'loss':>14} {'steps':>10} {'averagings':>10} {'waited s':>10} {'CPU s':>8}")
    for name in ("exact mean", "alone"):
        reference(name, **sizes)
    for system in RULES:
        compare(system, **sizes)
    if importlib.util.find_spec("hivemind") is None:
        print("expected hivemind in this environment, found none: it was not measured")
        return
    compare("hivemind", **sizes)


if __name__ == "__main__":
    main()
