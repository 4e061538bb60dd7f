"""hivemind beside this library: the same model, data and number of averagings on two replicas each.

Both train the demo model with AdamW on the standard library's source, each replica on its half.
*hivemind* averages the weights of its peers (``hivemind.Optimizer`` with local updates) over
libp2p. *mean* is the same rule here, through a folder: outer learning rate 1, no momentum; *DiLoCo*
is the default rule. *exact mean* is the rule without any library, both replicas in one process;
*perturbed* is *exact mean* from initial weights that are larger by a millionth, which shows how far
runs of one seed drift apart; *empty step* is *exact mean* after a step with zero gradients, which
hivemind's optimizer makes first; *alone* is *exact mean* without an average. hivemind's peers count
their samples together by estimates, so that their steps vary from run to run: *same steps* is
*exact mean* with the mean number of steps that hivemind's two peers took with the seed.

A row for each seed: held-out loss of the final weights, and steps, of both replicas (peers go on
training while they look for each other); averagings of both together; for each averaging the
seconds by which steps were longer than their median, and the CPU seconds of all processes of a
replica beyond the median step. Then a row for each system: the loss of all seeds, its standard
deviation, lowest and highest, and the means of the other columns.

Usage: python bench/peers.py [--rounds 8] [--every 50] [--seeds 1], in an environment with hivemind:
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
from collections.abc import Callable, Mapping, Sequence
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
REFERENCES = ("exact mean", "perturbed", "empty step", "alone")
TOGETHER = "Averaged parameters with 2 peers"
"""Line of hivemind's log."""
HEADER = f"{'':>10} {'loss':>14} {'steps':>10} {'averagings':>10} {'waited s':>10} {'CPU s':>8}"
SUMMARY = f"{'':>10} {'loss':>7} {'sd':>6} {'range':>14} {'steps':>6} {'waited s':>10} {'CPU s':>8}"


@dataclass(frozen=True)
class Outcome:
    """Figures of one system with one seed; losses and steps of both replicas."""

    losses: tuple[float, float]
    steps: tuple[float, float]
    averagings: int
    waited_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    def row(self, system: str) -> str:
        losses = ", ".join(f"{each:.3f}" for each in self.losses)
        steps = ", ".join(f"{each:.0f}" for each in self.steps)
        times = f"{self.waited_s:>10.2f} {self.cpu_s:>8.2f}"
        return f"{system:>10} {losses:>14} {steps:>10} {self.averagings:>10} {times}"


def summary(system: str, outcomes: Sequence[Outcome]) -> str:
    """The row of a system over its seeds."""
    losses = [outcome.loss for outcome in outcomes]
    spread = f"{statistics.stdev(losses):.3f}" if len(losses) > 1 else "-"
    steps = statistics.fmean(each for outcome in outcomes for each in outcome.steps)
    waited_s = statistics.fmean(outcome.waited_s for outcome in outcomes)
    used_s = statistics.fmean(outcome.cpu_s for outcome in outcomes)
    lowest_highest = f"{min(losses):.3f} to {max(losses):.3f}"
    figures = f"{statistics.fmean(losses):>7.3f} {spread:>6} {lowest_highest:>14}"
    return f"{system:>10} {figures} {steps:>6.0f} {waited_s:>10.2f} {used_s:>8.2f}"


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


def settings_of(system: str, *, rounds: int, every: int, seed: int) -> diloco.GroupSettings:
    return diloco.GroupSettings(
        num_replicas=2, max_replicas=2, start_replicas=2, sync_every=every, total_rounds=rounds,
        batch_size=BATCH, warmup_steps=0, seed=seed, **RULES.get(system, {}),
    )  # fmt: skip


def load_training(settings: diloco.GroupSettings, replica: int) -> Any:
    """The model and the data of a replica."""
    workload = ByteGPTWorkload(eval_bytes=32_768).to_dict()
    document = GroupDocument.new(settings, workload=workload)
    return load_workload(document, replica=replica, device="cpu")


def reference(name: str, *, rounds: int, every: int, seed: int) -> Outcome:
    """Train both replicas in this process. Without a library no time is lost."""
    torch.set_num_threads(1)
    settings = settings_of("mean", rounds=rounds, every=every, seed=seed)
    replicas = [load_training(settings, number) for number in range(2)]
    models = [replica.build_model() for replica in replicas]
    if name == "perturbed":
        with torch.no_grad():
            for parameter in itertools.chain(*(model.parameters() for model in models)):
                parameter.mul_(1 + 1e-6)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models]
    if name == "empty step":
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
    for step in range(rounds * every):
        for replica, model, optimizer in zip(replicas, models, optimizers, strict=True):
            loss = replica.loss(model, replica.train_batch(step))
            model.zero_grad()
            loss.backward()
            optimizer.step()
        if name != "alone" and (step + 1) % every == 0:
            with torch.no_grad():
                for one, other in zip(*(model.parameters() for model in models), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    one, other = (r.evaluate(model).loss for r, model in zip(replicas, models, strict=True))
    steps = rounds * every
    return Outcome((one, other), (steps, steps), 0 if name == "alone" else rounds)


def train(system: str, replica: int, place: str, *, rounds: int, every: int, seed: int) -> None:
    """Child process: train one replica and print its figures."""
    torch.set_num_threads(1)
    settings = settings_of(system, rounds=rounds, every=every, seed=seed)
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
    averaged.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
    (Path(place) / f"done-{replica}").touch()
    while not (Path(place) / f"done-{1 - replica}").exists():
        time.sleep(0.1)
    averaged.shutdown()
    dht.shutdown()
    return figures


def compare(system: str, *, rounds: int, every: int, seed: int) -> Outcome:
    """Train with one system in two processes."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--rounds", str(rounds), "--every", str(every), "--seed", str(seed)]
        options = [*sizes, "--place", folder, "--system", system]
        command = [sys.executable, __file__, *options, "--replica"]
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
    averagings = int(both[0].get("averagings") or output[0].count(TOGETHER))
    per_averaging = 2 * max(1, averagings)
    return Outcome(
        losses=(both[0]["loss"], both[1]["loss"]),
        steps=(both[0]["steps"], both[1]["steps"]),
        averagings=averagings,
        waited_s=sum(each["waited_s"] for each in both) / per_averaging,
        cpu_s=sum(each["cpu_s"] for each in both) / per_averaging,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 0")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--replica", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--place", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = {"rounds": given.rounds, "every": given.every}
    if given.system:
        train(given.system, given.replica, given.place, seed=given.seed, **sizes)
        return
    systems = [*REFERENCES, *RULES]
    if importlib.util.find_spec("hivemind") is None:
        print("expected hivemind in this environment, found none: it was not measured")
    else:
        systems.append("hivemind")
    outcomes: dict[str, list[Outcome]] = {system: [] for system in systems}
    print(HEADER)
    for seed in range(given.seeds):
        for system in systems:
            measure = reference if system in REFERENCES else compare
            outcomes[system].append(measure(system, seed=seed, **sizes))
            print(outcomes[system][-1].row(system), flush=True)
        if "hivemind" in systems:
            every = round(statistics.fmean(outcomes["hivemind"][-1].steps) / given.rounds)
            same = reference("same steps", rounds=given.rounds, every=every, seed=seed)
            outcomes.setdefault("same steps", []).append(same)
            print(same.row("same steps"), flush=True)
    print(f"\n{given.seeds} seeds\n{SUMMARY}")
    for system, measured in outcomes.items():
        print(summary(system, measured))


if __name__ == "__main__":
    main()
