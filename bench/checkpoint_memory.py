"""Peak memory of checkpoints and saved states beyond the training state, and how long they stop the
training thread.

Each case is a process of one replica with its local weights, the global weights, the momentum of
the outer optimizer and AdamW's two moments, all of ``--numel`` fp32 values. Counted is how far the
resident set grows at its peak (VmHWM, reset before), in models of fp32: for a save while the
training thread goes on, for a restore in a new process with the values that it keeps (two models:
weights and momentum, or AdamW's moments). The bound: two models, 384 MiB of parts in flight, and
128 MiB of smaller allocations that the C library keeps. *Stopped* is the time until the call
returns, *complete* the time until the manifest is stored. The last case is a group that trains with
all of it, beyond the same training state.

Usage: python bench/checkpoint_memory.py [--store file|s3|URI] [--numel N] [--repeat 3]
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

from bench.peak_memory import PARTS_BYTES
from bench.support.memory import reset_peak, resident, trained_model
from bench.support.processes import in_memory, in_processes, s3_server
from diloco.clock import SystemClock
from diloco.group import join
from diloco.init import create_group
from diloco.membership.lease import Lease
from diloco.model.flat_parameters import Layout
from diloco.model.inner_state import Inner
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store
from diloco.store.metered import MeteredStore
from diloco.store.open import open_store
from diloco.telemetry.writer import TelemetryWriter
from diloco.training.checkpoint import Restored, load_checkpoint, newest_manifest
from diloco.training.context import ReplicaContext
from diloco.training.local_progress import LocalProgress
from diloco.training.post_round import PostRoundTasks
from diloco.training.replica_state import load_replica_state

WARM_NUMEL = 2**16
ROUNDS, STEPS = 3, 4
TENSORS = 16
KEPT = 2
"""Models that a case can add: the copy of AdamW's moments, or the restored values."""

RETAINED_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Result:
    """Growth in bytes and seconds of one case; ``cpu_s`` is the CPU time of the training thread
    until the call returned."""

    grown: int
    stopped_s: float
    cpu_s: float
    complete_s: float


class Replica:
    """The objects of one replica that write its checkpoints."""

    def __init__(self, store: Store, numel: int, *, trained: bool) -> None:
        settings = GroupSettings(checkpoint_every=1, state_every=1)
        self.store = store
        self.identity = Identity(replica=0, incarnation="00001-00000000")
        if trained:
            model, self.optimizer = trained_model(numel, TENSORS)
        else:
            model = nn.ParameterList(torch.ones(numel // TENSORS) for _ in range(TENSORS))
            self.optimizer = torch.optim.AdamW(model.parameters())
        self.layout = Layout(model)
        clock = SystemClock()
        self.progress = LocalProgress(self.identity, settings, self.layout, clock)
        if trained:
            self._load_global()
        context = ReplicaContext(
            store=store,
            metered=MeteredStore(store),
            settings=settings,
            lease=Lease(
                store,
                self.identity,
                clock=clock,
                interval_s=3.0,
                heartbeat_timeout_s=15.0,
                device="cpu",
                on_drain=lambda within_s, reason: None,
            ),
            telemetry=TelemetryWriter(store, self.identity, clock=clock, interval_s=1e9),
            clock=clock,
            check=lambda: None,
        )
        self.tasks = PostRoundTasks(context, self.progress, Inner([self.optimizer]), None)

    def _load_global(self) -> None:
        self.commit = Commit(
            round=1,
            fragment=0,
            committer=self.identity,
            contributors=(self.identity,),
            void="",
            tokens_total=1,
            committed_total=1,
            wall_s=0.0,
        )
        for vector in self.progress.state.outer.vectors.values():
            vector.fill_(1.0)
        restored = Restored(
            round=1, weights=self.layout.read(), base_rounds=(1,), totals=Totals(committed=1)
        )
        self.progress.state.load(restored, self.commit)


def save(uri: str, what: str, numel: int) -> Result:
    """Write a checkpoint or the replica state."""
    torch.set_num_threads(1)
    for elements in (WARM_NUMEL, numel):  # what is loaded at first use is loaded with a small one
        where = uri if elements == numel else f"{uri}/warm-{what}"
        replica = Replica(open_store(where), elements, trained=True)
        before = reset_peak()
        start_s, cpu_s = time.monotonic(), time.thread_time()
        if what == "checkpoint":
            replica.tasks.checkpoint(replica.commit)
        else:
            replica.tasks.save_own()
        stopped_s, cpu_s = time.monotonic() - start_s, time.thread_time() - cpu_s
        if close := getattr(replica.tasks, "close", None):
            close(lambda: False)
        grown = resident("VmHWM") - before
        result = Result(grown, stopped_s, cpu_s, time.monotonic() - start_s)
    return result


def save_leaving(uri: str, what: str, numel: int) -> Result:
    """Write the replica state of a replica that leaves."""
    torch.set_num_threads(1)
    for elements in (WARM_NUMEL, numel):
        where = f"{uri}/left" if elements == numel else f"{uri}/warm-left"
        replica = Replica(open_store(where), elements, trained=True)
        before = reset_peak()
        start_s, cpu_s = time.monotonic(), time.thread_time()
        replica.tasks.save_leaving({}, data_step=1, lost_tokens=0)
        seconds, cpu_s = time.monotonic() - start_s, time.thread_time() - cpu_s
        result = Result(resident("VmHWM") - before, seconds, cpu_s, seconds)
    return result


def restore(uri: str, what: str, numel: int) -> Result:
    """Load a checkpoint or the replica state in a new process."""
    torch.set_num_threads(1)
    for elements in (WARM_NUMEL, numel):
        where = uri if elements == numel else f"{uri}/warm-{what}"
        replica = Replica(open_store(where), elements, trained=False)
        before = reset_peak()
        start_s, cpu_s = time.monotonic(), time.thread_time()
        if what == "checkpoint":
            manifest = newest_manifest(replica.store)
            assert manifest is not None
            kept = load_checkpoint(
                replica.store, manifest, replica.layout, replica.progress.state.outer
            )
            assert kept.round == 1
        else:
            saved = load_replica_state(replica.store, 0)
            assert saved is not None
            Inner([replica.optimizer]).load(saved.trees)
        seconds, cpu_s = time.monotonic() - start_s, time.thread_time() - cpu_s
        result = Result(resident("VmHWM") - before, seconds, cpu_s, seconds)
    return result


def rounds(uri: str, what: str, numel: int) -> Result:
    """Train a group of one replica with a checkpoint and a saved state in every round.

    Stopped is the time of the post-round tasks, complete that of all rounds.
    """
    torch.set_num_threads(1)
    for elements in (WARM_NUMEL, numel):
        where = f"{uri}/group" if elements == numel else f"{uri}/warm-group"
        settings = GroupSettings(
            num_replicas=1,
            sync_every=STEPS,
            total_rounds=ROUNDS,
            checkpoint_every=1,
            state_every=1,
            start_wait_s=0.0,
            warmup_steps=0,
        )
        create_group(where, settings)
        model, optimizer = trained_model(elements, TENSORS)
        before = reset_peak()
        start_s = time.monotonic()
        with join(where, model=model, inner_optimizer=optimizer, replica=0) as group:
            stopped = _timed_tasks(group._loop.tasks)
            while not group.done:
                for parameter in model:
                    parameter.data.mul_(1.0001)
                group.step(tokens=1, loss=1.0)
        grown = resident("VmHWM") - before - 2 * 4 * elements  # global weights, momentum
        result = Result(grown, sum(stopped), 0.0, time.monotonic() - start_s)
    return result


def _timed_tasks(tasks: PostRoundTasks) -> list[float]:
    """Return a list to which each call of ``after`` adds its seconds."""
    seconds: list[float] = []
    after = tasks.after

    def timed(commit: Commit) -> None:
        start_s = time.monotonic()
        after(commit)
        seconds.append(time.monotonic() - start_s)

    tasks.after = timed  # type: ignore[method-assign]
    return seconds


CASES = (
    ("checkpoint, save", save, "checkpoint"),
    ("replica state, periodic save", save, "state"),
    ("replica state, save on leaving", save_leaving, "state"),
    ("checkpoint, restore", restore, "checkpoint"),
    ("replica state, restore", restore, "state"),
    (f"{ROUNDS} rounds with both and the exchange", rounds, "group"),
)


def measure(uri: str, numel: int, repeat: int) -> float:
    """Print all cases; return the largest growth in models."""
    print("| case | growth, models of fp32 | stopped, s | of that CPU, s | complete, s |")
    print("| --- | ---: | ---: | ---: | ---: |", flush=True)
    worst = 0.0
    wheres = [f"{uri.rstrip('/')}/{uuid.uuid4().hex}" for _ in range(repeat)]
    for name, work, what in CASES:
        results = [in_processes(work, [(where, what, numel)])[0] for where in wheres]
        growth = [result.grown / (4 * numel) for result in results]
        worst = max(worst, *growth)
        stopped = statistics.median(result.stopped_s for result in results)
        cpu = statistics.median(result.cpu_s for result in results)
        complete = statistics.median(result.complete_s for result in results)
        times = f"{stopped:.2f} | {cpu:.2f} | {complete:.2f}"
        print(f"| {name} | {max(growth):.2f} | {times} |", flush=True)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="file", help="file (in memory), s3 (starts a server)")
    parser.add_argument("--numel", type=int, default=2**24)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    with in_memory() if given.store == "file" else s3_server() as uri:
        worst = measure(uri, given.numel, given.repeat)
    bound = KEPT + (PARTS_BYTES + RETAINED_BYTES) / (4 * given.numel)
    print(f"\nat most {worst:.2f} models beyond the training state; bound {bound:.2f}")
    return 0 if worst <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
