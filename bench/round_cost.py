"""Seconds of one outer synchronisation beside the best raw transfer of the same bytes.

Every replica is a process, as in reality; all of them and the server share this machine. *Ours* is
contribute and settle, from when the first replica begins until the last one has the mean: the
median of ``--rounds`` rounds after ``--warm`` others in which the parts in flight adapt. *Raw*
moves the bytes that the plan moves for each replica, with the same client, and does nothing else:
parts up, a barrier, parts down, with the fixed number of parts in flight that is the fastest of
``--in-flight``. The first column is raw over ours. The second is raw over ours without control,
which is what lies between and behind the transfers: records, plan, commit and polls for them.

``--line`` puts a line before the store (bench/support/line.py): 60 ms, 90 MB/s per connection and
1250 MB/s (10 Gbit/s) per replica. ``--scale`` divides these rates, the parts of 16 MiB and the
bytes that are read back after an upload, so that few cores carry the replicas: with 64, 7,812,500
parameters in fp32 stand for a billion in bf16. Latencies are not scaled. With the store ``file``
the line is simulated before a folder; with ``s3`` each replica has its own proxy before the server,
and parts are not smaller than S3 demands.

``--naive`` adds the naive baseline, which is no measure of quality: one object per tensor, one
tensor after the other, and a look for the peers' objects once a second.

Usage: python bench/round_cost.py [--store file|s3|URI] [--replicas 2 4 8] [--line] [--scale 64]
       [--plan gather sharded syncer] [--codec C] [--numel N] [--rounds 5] [--warm 5] [--naive]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.support import textbook
from bench.support.cuts import small_cuts
from bench.support.exchanging import SYNCER_NUMBER, BareMember, bare_settings
from bench.support.line import MB, LineSpec, LineStore, proxied
from bench.support.processes import in_memory, in_processes, meet, phase_medians, s3_server
from diloco.exchange.upload import DEFAULT_BYTES, VERIFY_UPLOAD_BYTES
from diloco.protocol.reduce_cost import RoundCost, round_cost
from diloco.store import transfers
from diloco.store.base import PART_BYTES, Store
from diloco.store.metered import MeteredStore
from diloco.store.open import open_store

TENSORS = 144
NUMEL = 2_800_080
PHASES = ("encode", "upload", "wait", "download", "reduce")
BUSY = ("encode", "upload", "download", "reduce")
LINE = LineSpec(latency_s=0.06, connection=90 * MB, total=1250 * MB)
SMALL_BLOCK = 2**14
SMALLEST_S3_PART = 5 * 2**20
"""S3 rejects a smaller part of a multipart upload, except the last one."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The store of one measurement: ``addresses`` are the replicas' proxies, ``line`` that of a
    folder."""

    uri: str
    line: LineSpec | None = None
    addresses: tuple[str, ...] = ()
    part_bytes: int = PART_BYTES
    verify_bytes: int = DEFAULT_BYTES

    def below(self, name: str) -> Place:
        return replace(self, uri=f"{self.uri.rstrip('/')}/{name}")

    def fresh(self) -> Place:
        return self.below(uuid.uuid4().hex)

    def open(self, number: int) -> Store:
        """Open the store in the process of a replica."""
        if self.addresses:
            os.environ["AWS_ENDPOINT_URL"] = self.addresses[number]
        if self.line and not self.addresses:
            return LineStore(Path(self.uri), self.line)
        return open_store(self.uri)

    @contextlib.contextmanager
    def cuts(self) -> Iterator[None]:
        """Parts of another size, in the process of a replica."""
        if self.part_bytes == PART_BYTES:
            yield
            return
        os.environ[VERIFY_UPLOAD_BYTES] = str(self.verify_bytes)
        with small_cuts(block=SMALL_BLOCK, part_bytes=self.part_bytes):
            yield


@dataclass(frozen=True, kw_only=True)
class Case:
    replicas: int
    plan: str
    codec: str
    numel: int
    rounds: int
    warm: int

    @property
    def cost(self) -> RoundCost:
        return round_cost(
            numel=self.numel, codec=self.codec, replicas=self.replicas, mode=self.plan
        )


@dataclass(frozen=True)
class Sync:
    """One process's part of one round; begin and end are on the machine's clock."""

    begin: float
    end: float
    phases: dict[str, float]
    requests: int
    cpu_s: float
    limits: tuple[int, int]


def exchange(number: int, place: Place, case: Case) -> list[Sync]:
    """The rounds of one replica."""
    torch.set_num_threads(1)
    with place.cuts():
        store = MeteredStore(place.open(number))
        settings = bare_settings(replicas=case.replicas, plan=case.plan, codec=case.codec)
        member = BareMember(store, number, settings, [case.numel // TENSORS] * TENSORS)
        member.put_lease()
        seed = torch.Generator().manual_seed(number)
        numel = TENSORS * (case.numel // TENSORS)
        vector = None if number == SYNCER_NUMBER else torch.randn(numel, generator=seed)
        found = []
        for round in range(1, case.warm + case.rounds + 1):
            meet()
            requests, cpu_s, begin = store.usage.requests, time.process_time(), time.monotonic()
            _, timings = member.round(round, vector)
            end = time.monotonic()
            requests, cpu_s = store.usage.requests - requests, time.process_time() - cpu_s
            limits = (transfers.UPLOAD_LINE.limit, transfers.DOWNLOAD_LINE.limit)
            found.append(Sync(begin, end, timings.seconds, requests, cpu_s, limits))
            meet()
            if number == 0:
                _delete_large(place, f"rounds/{round:08d}/")
    return found[case.warm :]


def transfer(number: int, place: Place, case: Case, in_flight: int) -> list[tuple[float, float]]:
    """The bytes of one replica, without an exchange."""
    store = place.open(number)
    body, cost = memoryview(bytes(PART_BYTES)), case.cost

    def parts(of: int, size_bytes: int) -> list[tuple[str, int]]:
        starts = range(0, size_bytes, place.part_bytes)
        sizes = [min(place.part_bytes, size_bytes - start) for start in starts]
        return [(f"{of}/{index}", size) for index, size in enumerate(sizes)]

    def put(part: tuple[str, int]) -> None:
        store.put(part[0], body[: part[1]])

    def get(part: tuple[str, int]) -> None:
        assert len(store.get_range(part[0], 0, part[1])) == part[1]

    peers = [peer for peer in range(case.replicas) if peer != number]
    mine = parts(number, cost.up)
    wanted = [part for peer in peers for part in parts(peer, cost.down // len(peers))]
    found = []
    with ThreadPoolExecutor(in_flight) as pool:
        for _ in range(1 + case.rounds):
            meet()
            begin = time.monotonic()
            list(pool.map(put, mine))
            meet()
            list(pool.map(get, wanted))
            found.append((begin, time.monotonic()))
    meet()
    if number == 0:
        _delete_large(place, "")
    return found[1:]


def _delete_large(place: Place, prefix: str) -> None:
    store = open_store(place.uri)
    store.delete([one.key for one in store.list(prefix) if one.size_bytes > 2**16])


@dataclass(frozen=True, kw_only=True)
class Row:
    case: Case
    seconds: list[float]
    raw: list[float]
    in_flight: int
    syncs: list[Sync]
    naive_s: float | None = None

    def cells(self) -> list[str]:
        ours_s, raw_s = statistics.median(self.seconds), statistics.median(self.raw)
        phases = phase_medians([sync.phases for sync in self.syncs])
        limits = [
            statistics.median(one) for one in zip(*(s.limits for s in self.syncs), strict=True)
        ]
        return [
            f"**{100 * raw_s / ours_s:.0f} %**",
            f"{100 * raw_s / sum(phases.get(phase, 0.0) for phase in BUSY):.0f} %",
            self.case.plan,
            str(self.case.replicas),
            f"{ours_s:.2f} ({min(self.seconds):.2f} to {max(self.seconds):.2f})",
            f"{raw_s:.2f} ({self.in_flight})",
            f"{limits[0]:.0f}, {limits[1]:.0f}",
            *(f"{phases.get(phase, 0.0):.2f}" for phase in PHASES),
            f"{statistics.median(sync.cpu_s for sync in self.syncs):.2f}",
            f"{statistics.mean(sync.requests for sync in self.syncs):.0f}",
            *([f"{self.naive_s:.0f}"] if self.naive_s is not None else []),
        ]


HEAD = (
    "of raw",
    "without control",
    "plan",
    "N",
    "ours, s",
    "raw, s (in flight)",
    "in flight, up and down",
    *PHASES,
)


def spans(found: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Seconds of each round, from the first begin to the last end."""
    together = zip(*found, strict=True)
    return [max(end for _, end in one) - min(begin for begin, _ in one) for one in together]


def measure(place: Place, case: Case, in_flight: Sequence[int], naive_s: float | None) -> Row:
    def processes(work: Callable[..., list], numbers: Sequence[int], *more: object) -> list:
        where = place.fresh()
        return in_processes(work, [(number, where, case, *more) for number in numbers])

    replicas = range(case.replicas)
    raws = {count: spans(processes(transfer, replicas, count)) for count in in_flight}
    best = min(raws, key=lambda count: statistics.median(raws[count]))
    numbers = [*replicas, *([SYNCER_NUMBER] if case.plan == "syncer" else [])]
    syncs = processes(exchange, numbers)[: case.replicas]
    seconds = spans([[(sync.begin, sync.end) for sync in one] for one in syncs])
    every = [sync for one in syncs for sync in one]
    return Row(
        case=case, seconds=seconds, raw=raws[best], in_flight=best, syncs=every, naive_s=naive_s
    )


def naive(uri: str, sizes: Sequence[int], numel: int) -> dict[int, float]:
    """Seconds of the naive baseline for each number of replicas; all at the same time, because it
    mostly sleeps."""

    def one(replicas: int) -> float:
        where = f"{uri.rstrip('/')}/{uuid.uuid4().hex}"
        each = [(n, where, replicas, [numel // TENSORS] * TENSORS) for n in range(replicas)]
        return spans([[span] for span in in_processes(textbook.synchronise, each)])[0]

    with ThreadPoolExecutor(len(sizes)) as pool:
        return dict(zip(sizes, pool.map(one, sizes), strict=True))


@contextlib.contextmanager
def places(kind: str, line: LineSpec | None, scale: int, replicas: int) -> Iterator[Place]:
    verify_bytes = DEFAULT_BYTES // scale
    if kind == "file":
        with in_memory() as folder:
            part_bytes = PART_BYTES // scale
            yield Place(uri=folder, line=line, part_bytes=part_bytes, verify_bytes=verify_bytes)
    elif kind == "s3":
        with s3_server() as uri, contextlib.ExitStack() as stack:
            addresses: list[str] = []
            if line:
                target = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
                addresses = stack.enter_context(proxied(target, line, replicas))
            yield Place(
                uri=uri,
                line=line,
                addresses=tuple(addresses),
                part_bytes=max(PART_BYTES // scale, SMALLEST_S3_PART),
                verify_bytes=verify_bytes,
            )
    else:
        yield Place(uri=kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="file", help="file, s3, or a URI")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--plan", nargs="+", default=["gather", "sharded"])
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--numel", type=int, default=NUMEL)
    parser.add_argument("--line", action="store_true", help="put a line before the store")
    parser.add_argument("--scale", type=int, default=1, help="divide the line's rates and parts")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[8, 12, 16, 24])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--naive", action="store_true", help="measure it too: minutes")
    given = parser.parse_args()
    line = None
    if given.line:
        connection, total = LINE.connection / given.scale, LINE.total / given.scale
        line = replace(LINE, connection=connection, total=total)
    with places(given.store, line, given.scale, max(given.replicas)) as place:
        print(f"{given.numel:,} parameters, {given.codec}, store {given.store}, line: {line}\n")
        last = ["naive: object per tensor, 1 s poll"] if given.naive else []
        head = [*HEAD, "CPU s each", "requests", *last]
        print(f"| {' | '.join(head)} |\n| {' | '.join(['---'] * len(head))} |", flush=True)
        slow = naive(place.uri, given.replicas, given.numel) if given.naive else {}
        for plan in given.plan:
            for replicas in given.replicas:
                case = Case(
                    replicas=replicas,
                    plan=plan,
                    codec=given.codec,
                    numel=given.numel,
                    rounds=given.rounds,
                    warm=given.warm,
                )
                row = measure(place, case, given.in_flight, slow.get(replicas))
                print(f"| {' | '.join(row.cells())} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
