"""Large fragments: an exchange beside raw parallel PUT and GET of the same bytes.

Two replicas, each a process, on one S3 server. *Raw* is what the same store gives to the same
processes when nothing is encoded, checked, summed or agreed upon: each uploads as many bytes as the
plan has it upload, as objects of 16 MiB by six threads at once, waits until the other has done so
too, and then reads as many of the other's in the same way. The exchange is contribute and settle.
Raw and exchange take turns, ``--repeat`` times; medians and ranges are printed. CPU is the
processes' own, without the server.

Usage: python bench/large_fragments.py [--store s3|file|URI] [--mb 256] [--repeat 3]
       [--codec fp32 bf16] [--plan gather sharded]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.support.exchanging import BareMember, bare_settings
from bench.support.processes import in_processes, meet, phase_medians, somewhere
from diloco.protocol.payload_size import payload_bytes
from diloco.protocol.reduce_cost import round_cost
from diloco.store.base import PART_BYTES, Store
from diloco.store.open import open_store

REPLICAS = 2
THREADS = 6


@dataclass(frozen=True)
class Case:
    plan: str
    codec: str
    numel: int


@dataclass(frozen=True)
class Turn:
    """One process's part of one turn; begin and end are on the machine's clock."""

    begin: float
    end: float
    cpu_s: float
    phases: dict[str, float]


def timed(work: Callable[[], dict[str, float]]) -> Turn:
    meet()
    begin, cpu = time.monotonic(), time.process_time()
    phases = work()
    return Turn(begin, time.monotonic(), time.process_time() - cpu, phases)


def raw(store: Store, turn: int, replica: int, case: Case) -> dict[str, float]:
    cost = round_cost(numel=case.numel, codec=case.codec, replicas=REPLICAS, mode=case.plan)
    body = memoryview(bytearray(PART_BYTES))

    def objects(of: int, size_bytes: int) -> list[tuple[str, int]]:
        starts = range(0, size_bytes, PART_BYTES)
        sizes = [min(PART_BYTES, size_bytes - start) for start in starts]
        return [(f"raw/{turn}/{of}/{index}", size) for index, size in enumerate(sizes)]

    with ThreadPoolExecutor(THREADS) as pool:
        begin = time.monotonic()
        list(pool.map(lambda o: store.put(o[0], body[: o[1]]), objects(replica, cost.up)))
        up = time.monotonic()
        meet()
        there = time.monotonic()
        wanted = objects(1 - replica, cost.down)
        list(pool.map(lambda o: len(store.get_range(o[0], 0, o[1])), wanted))
        end = time.monotonic()
    return {"upload": up - begin, "wait": there - up, "download": end - there}


def replica(number: int, uri: str, case: Case, repeat: int) -> list[tuple[Turn, Turn]]:
    torch.set_num_threads(1)
    store = open_store(uri)
    settings = bare_settings(replicas=REPLICAS, plan=case.plan, codec=case.codec)
    tensors = [case.numel // 16] * 16
    member = BareMember(store, number, settings, tensors)
    member.put_lease()
    vector = torch.randn(case.numel, generator=torch.Generator().manual_seed(number))
    turns = []
    for round in range(1, repeat + 1):
        rawly = timed(lambda round=round: raw(store, round, number, case))
        ours = timed(lambda round=round: member.round(round, vector)[1].seconds)
        meet()
        if number == 0:
            store.delete([info.key for info in store.list("raw/") if info.size_bytes])
            store.delete(
                [i.key for i in store.list(f"rounds/{round:08d}/") if i.size_bytes > 1 << 20]
            )
        turns.append((rawly, ours))
    return turns


def spans(turns: list[tuple[Turn, ...]]) -> list[float]:
    return [max(t.end for t in one) - min(t.begin for t in one) for one in turns]


def formatted(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(case: Case, found: list[list[tuple[Turn, Turn]]]) -> None:
    rounds = list(zip(*found, strict=True))
    raws = [tuple(pair[0] for pair in one) for one in rounds]
    exchanges = [tuple(pair[1] for pair in one) for one in rounds]
    raw_s, ours_s = spans(raws), spans(exchanges)
    ratios = [100 * a / b for a, b in zip(raw_s, ours_s, strict=True)]
    cost = round_cost(numel=case.numel, codec=case.codec, replicas=REPLICAS, mode=case.plan)
    cpu = [statistics.median(t.cpu_s for one in turns for t in one) for turns in (raws, exchanges)]
    print(
        f"| {case.plan} | {case.codec} | {cost.up / 1e6:.0f} + {cost.down / 1e6:.0f} "
        f"| {formatted(raw_s)} | {formatted(ours_s)} | **{statistics.median(ratios):.0f} %** "
        f"({min(ratios):.0f} to {max(ratios):.0f}) | {cpu[0]:.2f}, {cpu[1]:.2f} |"
    )
    for name, turns in (("raw", raws), ("exchange", exchanges)):
        medians = phase_medians([t.phases for one in turns for t in one])
        text = ", ".join(f"{p} {s:.2f}" for p, s in medians.items())
        print(f"    {name}: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="s3", help="s3 (starts a server), file, or a URI")
    parser.add_argument("--mb", type=int, default=64, help="payload, MiB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--codec", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--plan", nargs="+", default=["gather", "sharded"])
    given = parser.parse_args()
    print(
        "| plan | codec | MB up + down, each | raw, s | exchange, s | raw / exchange "
        "| CPU s each: raw, exchange |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for codec in given.codec:
        for plan in given.plan:
            with somewhere(given.store) as uri:  # a new one each time: they give no space back
                numel = given.mb * 2**20 // (payload_bytes(2**20, codec) // 2**20)
                case = Case(plan, codec, numel)
                where = f"{uri.rstrip('/')}/{uuid.uuid4().hex}"
                each = [(number, where, case, given.repeat) for number in range(REPLICAS)]
                report(case, in_processes(replica, each))
    return 0


if __name__ == "__main__":
    sys.exit(main())
