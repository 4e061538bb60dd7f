"""Peak memory of an exchange beyond the model, as a multiple of the fragment.

One process contributes and settles a round over a folder in which the peers' payloads, and in a
sharded round their shards, lie already; in a syncer round the syncer is measured apart. Counted is
how far the resident set grows at its peak (VmHWM, reset before), from when the process has imported
everything and holds its pseudo-gradient, plus that gradient. The bound: two fragments, the payload
if it is kept (E3M0, top-k), the parts in flight and four that are produced or used (448 MiB),
whatever the number of replicas. Ends with status 1 above it.

Applying a round comes after that: with overlap, steps were made since the snapshot and a share of
them is kept; a replica that was missed keeps all. Counted is the same growth, with gradient and
mean.

Usage: python bench/peak_memory.py [--numel N] [--replicas 2 4 8] [--plan P ...] [--codec C ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from bench.support.exchanging import SYNCER_NUMBER, BareMember, bare_settings, in_threads
from bench.support.memory import reset_peak, resident
from bench.support.processes import in_memory, in_processes
from diloco.clock import SystemClock
from diloco.exchange.inflight_rounds import InflightRound
from diloco.exchange.payload import KEPT_SHARE
from diloco.exchange.reduce import Merged, Own
from diloco.exchange.round_exchange import Sent
from diloco.model.flat_parameters import Layout
from diloco.protocol import keys
from diloco.protocol.payload_size import payload_bytes
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.store.base import PART_BYTES, LocalStore
from diloco.store.transfers import BYTES_IN_FLIGHT
from diloco.training.checkpoint import Restored
from diloco.training.local_progress import LocalProgress

PARTS_BYTES = BYTES_IN_FLIGHT + 4 * PART_BYTES
QUICK_NUMEL = 2**24
CODECS = ("fp32", "bf16", "int8", "e3m0", "topk")


def member(folder: str, number: int, replicas: int, plan: str, codec: str, n: int) -> BareMember:
    settings = bare_settings(replicas=replicas, plan=plan, codec=codec)
    return BareMember(LocalStore(Path(folder)), number, settings, [n // 16] * 16)


def gradient(number: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(number))


def contribute_all(folder: str, replicas: int, codec: str, numel: int) -> None:
    """The contributions of every replica, made one by one."""
    torch.set_num_threads(1)
    for number in range(replicas):
        one = member(folder, number, replicas, "gather", codec, numel)
        one.contribute(1, gradient(number, numel))


def settle_once(folder: str, replicas: int, plan: str, codec: str, numel: int) -> None:
    """Replica 0, whose peers are dead, makes the plan and all shards."""
    torch.set_num_threads(1)
    numbers = [0, *([SYNCER_NUMBER] if plan == "syncer" else [])]
    members = [member(folder, number, replicas, plan, codec, numel) for number in numbers]
    for one in members:
        one.put_lease()
    in_threads([lambda one=one: one.settle(1, None) for one in members])


def peak(folder: str, number: int, replicas: int, plan: str, codec: str, numel: int) -> int:
    """Bytes beyond the model."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-") as small:  # what is loaded at first use
        warm = member(small, 0, 1, "gather", codec, 2**18)
        warm.put_lease()
        warm.round(1, torch.ones(2**18))
    vector = None if number == SYNCER_NUMBER else gradient(number, numel)
    measured = member(folder, number, replicas, plan, codec, numel)
    before = reset_peak()
    settled, _ = measured.round(1, vector)
    grown = resident("VmHWM") - before
    assert settled.plan.mode == plan and len(settled.commit.contributors) == replicas, settled
    return grown + (0 if vector is None else 4 * numel)


def apply(numel: int, included: bool) -> int:
    """Bytes beyond model, global weights and outer optimizer when a round is applied that was
    exchanged under computation."""
    torch.set_num_threads(1)
    for elements in (2**18, numel):  # what is loaded at first use is loaded with a small one
        progress, opened = open_round(elements)
        before = reset_peak()
        merged = Merged(vector=gradient(1, elements))
        who = Identity(replica=0 if included else 1, incarnation=progress.identity.incarnation)
        commit = Commit(
            round=1,
            fragment=0,
            committer=who,
            contributors=(who,),
            void="",
            tokens_total=1,
            committed_total=1,
            wall_s=0.0,
        )
        outcome = progress.apply(commit, merged, opened, keep=1.0)
        assert outcome == ("included" if included else "late"), outcome
    return resident("VmHWM") - before + 4 * numel


def open_round(numel: int) -> tuple[LocalProgress, InflightRound]:
    """A progress with a round on its way, and a step on top of it."""
    settings = bare_settings(replicas=2, plan="gather", sync_every=2, overlap_steps=1)
    model = nn.ParameterList([nn.Parameter(torch.ones(numel // 16)) for _ in range(16)])
    layout = Layout(model)
    me = Identity(replica=0, incarnation="00001-00000000")
    progress = LocalProgress(me, settings, layout, SystemClock())
    weights = gradient(0, layout.numel)
    progress.state.load(Restored(round=0, weights=weights, base_rounds=(0,), totals=Totals()), None)
    progress.counter.begin_round()
    for _ in range(2):
        with torch.no_grad():
            for parameter in model:
                parameter.mul_(0.5)
        progress.counter.count(tokens=1, loss=1.0)
        if progress.counter.now.steps == 1:
            opened = progress.open(1, 0)
            assert opened is not None
    opened.sent = Sent(
        record=None,  # type: ignore[arg-type]
        own=Own(identity=me, digest="", vector=opened.contributed),
        checking=Future(),
    )
    return progress, opened


def measure(made: str, replicas: int, plan: str, codec: str, numel: int) -> dict[int, int]:
    """Peak of replica 0, and of the syncer, by number; ``made`` has all contributions."""
    with in_memory() as folder:
        root = Path(folder)
        for source in (Path(made) / keys.contributions(1)).iterdir():
            if int(source.name[:5]) < replicas:
                target = root / keys.contributions(1) / source.name
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(source, target)
        case = (replicas, plan, codec, numel)
        in_processes(settle_once, [(folder, *case)])
        found = {}
        for number in [*([SYNCER_NUMBER] if plan == "syncer" else []), 0]:
            if number == SYNCER_NUMBER or plan != "syncer":
                (root / keys.commit(1)).unlink()
                for shard in (root / keys.reduced(1)).glob(f"{0:05d}.*"):
                    shard.unlink()
            (found[number],) = in_processes(peak, [(folder, number, *case)])
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=QUICK_NUMEL)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--plan", nargs="+", default=["gather", "sharded", "syncer"])
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=["fp32", "int8"])
    given = parser.parse_args()
    fragment = 4 * given.numel
    payloads = [payload_bytes(given.numel, codec) for codec in given.codec]
    kept = max((size for size in payloads if size * KEPT_SHARE < fragment), default=0)
    bound = 2 + (kept + PARTS_BYTES) / fragment
    worst = 0.0
    print(f"fragment {fragment / 2**20:.0f} MiB; bound: {bound:.2f} fragments\n")
    print(f"| plan | codec | {' | '.join(f'N = {n}' for n in given.replicas)} |")
    print(f"| --- | --- |{' ---: |' * len(given.replicas)}", flush=True)
    for codec in given.codec:
        with in_memory() as made:
            most = max(given.replicas)
            in_processes(contribute_all, [(made, most, codec, given.numel)])
            for plan in given.plan:
                peaks = [measure(made, n, plan, codec, given.numel) for n in given.replicas]
                for number in peaks[0]:
                    shares = [found[number] / fragment for found in peaks]
                    worst = max(worst, *shares)
                    name = f"{plan}{', the syncer itself' if number == SYNCER_NUMBER else ''}"
                    cells = " | ".join(f"{share:.2f}" for share in shares)
                    print(f"| {name} | {codec} | {cells} |", flush=True)
    print("\n| applying under overlap | fragments |\n| --- | ---: |")
    for name, included in (("included", True), ("late", False)):
        (found,) = in_processes(apply, [(given.numel, included)])
        worst = max(worst, found / fragment)
        print(f"| {name} | {found / fragment:.2f} |", flush=True)
    print(f"\nat most {worst:.2f} fragments")
    return 0 if worst <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
