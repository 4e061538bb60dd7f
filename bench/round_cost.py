"""Seconds of one outer synchronisation, phase by phase, beside the textbook baseline.

Every replica is a process, as in reality; all of them and the server share this machine. Both ways
move the same 144 tensors (2.8M fp32 parameters) over the same store. The baseline puts one object
per tensor, one tensor after the other, and looks for the peers' objects once a second; it is
measured once, for all sizes at the same time, because it mostly sleeps. Ours is the median of
``--rounds`` rounds after one that opens connections, from when the first replica begins to when the
last one has the mean. *Raw* puts and gets the bytes of the plan and does nothing else: what this
store and these cores allow at that moment.

Usage: python bench/round_cost.py [--store s3|file|URI ...] [--replicas 2 4 8]
       [--plan auto gather sharded syncer] [--codec C] [--rounds 5] [--baseline]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.support import textbook
from bench.support.exchanging import SYNCER_NUMBER, BareMember, bare_settings
from bench.support.processes import in_processes, meet, phase_medians, somewhere
from diloco.exchange.reduce import IN_FLIGHT
from diloco.protocol.reduce_cost import RoundCost, round_cost
from diloco.store.base import MeteredStore
from diloco.store.open import open_store

TENSORS = 144
NUMEL = 2_800_080
SIZES = [NUMEL // TENSORS] * TENSORS
PHASES = ("encode", "upload", "wait", "download", "reduce")


@dataclass(frozen=True)
class Sync:
    """One process's part of one round; begin and end are on the machine's clock."""

    plan: str
    begin: float
    end: float
    phases: dict[str, float]
    requests: int
    cpu_s: float


def replica(number: int, uri: str, replicas: int, plan: str, codec: str, rounds: int) -> list[Sync]:
    torch.set_num_threads(1)
    store = MeteredStore(open_store(uri))
    settings = bare_settings(replicas=replicas, plan=plan, codec=codec)
    member = BareMember(store, number, settings, SIZES)
    member.put_lease()
    seed = torch.Generator().manual_seed(number)
    vector = None if number == SYNCER_NUMBER else torch.randn(NUMEL, generator=seed)
    found = []
    for round in range(1, rounds + 2):
        meet()
        before, cpu_s, begin = store.usage.requests, time.process_time(), time.monotonic()
        settled, timings = member.round(round, vector)
        end = time.monotonic()
        requests = store.usage.requests - before
        cpu_s = time.process_time() - cpu_s
        found.append(Sync(settled.plan.mode, begin, end, timings.seconds, requests, cpu_s))
    return found[1:]


@dataclass(frozen=True)
class Row:
    name: str
    replicas: int
    seconds: list[float]
    requests: float = 0.0
    cpu_s: float = 0.0
    phases: dict[str, float] | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def ours(uri: str, replicas: int, plan: str, codec: str, rounds: int) -> Row:
    where = f"{uri.rstrip('/')}/{uuid.uuid4().hex}"
    numbers = [*range(replicas), *([SYNCER_NUMBER] if plan == "syncer" else [])]
    found = in_processes(
        replica, [(number, where, replicas, plan, codec, rounds) for number in numbers]
    )[:replicas]
    together = list(zip(*found, strict=True))
    everyone = [sync for one in together for sync in one]
    used = "/".join(sorted({sync.plan for sync in everyone}))
    return Row(
        name=f"auto: {used}" if plan == "auto" else used,
        replicas=replicas,
        seconds=[max(s.end for s in one) - min(s.begin for s in one) for one in together],
        requests=statistics.mean(sync.requests for sync in everyone),
        cpu_s=statistics.median(sync.cpu_s for sync in everyone),
        phases=phase_medians([sync.phases for sync in everyone]),
    )


def raw_replica(
    number: int, uri: str, cost: RoundCost, replicas: int, rounds: int
) -> list[tuple[float, float]]:
    """Each round one object up and the peers' down, in as many requests as there are peers."""
    store = open_store(uri)
    found = []
    for round in range(rounds + 1):
        meet()
        begin = time.monotonic()
        store.put(f"{round}/{number}", bytes(cost.up))
        meet()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            wanted = [f"{round}/{peer}" for peer in range(replicas) if peer != number]
            share = cost.down // len(wanted)
            list(pool.map(lambda key, size=share: len(store.get_range(key, 0, size)), wanted))
        found.append((begin, time.monotonic()))
    return found[1:]


def raw(uri: str, replicas: int, plan: str, codec: str, rounds: int) -> Row:
    """The same bytes as a round of the plan, and nothing else: what the store allows here."""
    cost = round_cost(numel=NUMEL, codec=codec, replicas=replicas, mode=plan)
    where = f"{uri.rstrip('/')}/{uuid.uuid4().hex}"
    each = [(number, where, cost, replicas, rounds) for number in range(replicas)]
    together = list(zip(*in_processes(raw_replica, each), strict=True))
    spans = [max(e for _, e in one) - min(b for b, _ in one) for one in together]
    return Row(f"raw, bytes of {plan}", replicas, spans)


def baselines(uri: str, sizes: Sequence[int]) -> list[Row]:
    def measure(replicas: int) -> Row:
        where = f"{uri.rstrip('/')}/{uuid.uuid4().hex}"
        each = [(number, where, replicas, SIZES) for number in range(replicas)]
        spans = in_processes(textbook.synchronise, each)
        seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
        return Row("object per tensor, 1 s poll", replicas, [seconds])

    with ThreadPoolExecutor(len(sizes)) as pool:
        return list(pool.map(measure, sizes))


def show(row: Row, slow: Row | None) -> None:
    low, high = min(row.seconds), max(row.seconds)
    spread = f" ({low:.3f} to {high:.3f})" if len(row.seconds) > 1 else ""
    phases = [f"{(row.phases or {}).get(p, 0.0):.3f}" if row.phases else "" for p in PHASES]
    faster = f"**{slow.median_s / row.median_s:.0f} x**" if slow else ""
    counts = [f"{row.cpu_s:.3f}", f"{row.requests:.1f}"] if row.requests else ["", ""]
    cells = [row.name, str(row.replicas), f"{row.median_s:.3f}{spread}", *phases, *counts, faster]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", nargs="+", default=["file"], help="s3, file, or a URI")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--plan", nargs="+", default=["auto", "gather", "sharded", "syncer"])
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--baseline", action="store_true", help="measure it too: two minutes")
    given = parser.parse_args()
    for kind in given.store:
        with somewhere(kind) as uri:
            print(f"\n{TENSORS} tensors, {NUMEL:,} parameters, {given.codec}, store {uri}\n")
            print(f"| plan | N | seconds | {' | '.join(PHASES)} | CPU s each | requests | faster |")
            print(f"| --- | ---: | --- | {'---: | ' * (len(PHASES) + 3)}")
            slow = baselines(uri, given.replicas) if given.baseline else []
            for row in slow:
                show(row, None)
            for plan in given.plan:
                for replicas in given.replicas:
                    if plan in ("gather", "sharded"):
                        show(raw(uri, replicas, plan, given.codec, given.rounds), None)
                    row = ours(uri, replicas, plan, given.codec, given.rounds)
                    show(row, next((s for s in slow if s.replicas == replicas), None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
