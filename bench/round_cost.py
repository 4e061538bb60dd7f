"""Bytes, requests and seconds of one outer synchronisation, beside the textbook baseline.

Ours: one packed payload per replica, the gather plan, as replicas run it. Baseline: one object per
tensor, one tensor after the other, looking for the peers' objects once a second. Both move the same
144 tensors (2.8M parameters, fp32) between the same number of replicas (threads) over the same
store. The baselines of all sizes run at the same time: they mostly sleep.

Usage: python bench/round_cost.py [--store URI] [--replicas 2 4 8] [--no-baseline]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from diloco.exchange import Base, Exchange, LocalWork, Timings
from diloco.membership import Observer
from diloco.rendezvous import plan_cost
from diloco.rendezvous.clock import SystemClock
from diloco.rendezvous.records import Identity
from diloco.rendezvous.rounds import Totals
from diloco.rendezvous.settings import GroupSettings
from diloco.rendezvous.store import MeteredStore, MissingKey, Store, open_store

TENSORS = 144
NUMEL = 2_800_080
ROUNDS = 5


@dataclass(frozen=True)
class Row:
    name: str
    replicas: int
    seconds: float
    up: int
    down: int
    requests: float


def together(replicas: int, work: Callable[[int], None]) -> float:
    """Run ``work`` for every replica at once; seconds until the last is done."""
    barrier = threading.Barrier(replicas + 1)

    def run(replica: int) -> None:
        barrier.wait()
        work(replica)

    with ThreadPoolExecutor(replicas) as pool:
        futures = [pool.submit(run, replica) for replica in range(replicas)]
        barrier.wait()
        start = time.perf_counter()
        for future in futures:
            future.result()
        return time.perf_counter() - start


def stores(uri: str, replicas: int) -> list[MeteredStore]:
    prefix = f"{uri.rstrip('/')}/{uuid.uuid4().hex}"
    return [MeteredStore(open_store(prefix)) for _ in range(replicas)]


def per_replica(metered: list[MeteredStore], divide_by: int) -> tuple[int, int, float]:
    n = len(metered) * divide_by
    return (
        round(sum(store.usage.bytes_up for store in metered) / n),
        round(sum(store.usage.bytes_down for store in metered) / n),
        sum(store.usage.requests for store in metered) / n,
    )


def ours(uri: str, replicas: int) -> Row:
    settings = GroupSettings(
        num_replicas=replicas, min_quorum=replicas, max_replicas=64, warmup_steps=0
    )
    clock = SystemClock()
    metered = stores(uri, replicas)
    exchanges = []
    for replica, store in enumerate(metered):
        identity = Identity(replica=replica, incarnation=f"00001-{replica:08x}")
        observer = Observer(store, clock=clock, timeout_s=60)
        exchanges.append(
            Exchange(
                store, identity, settings, clock=clock, observer=observer, model_hash="bench",
                numel=NUMEL, check=lambda: None,
            )
        )  # fmt: skip
    gradients = [torch.randn(NUMEL) for _ in range(replicas)]
    seconds = []
    for number in range(1, ROUNDS + 1):
        base = Base(round=number - 1, digest="bench")
        totals = Totals(committed=number - 1)

        def synchronise(replica: int, number: int = number, base: Base = base,
                        totals: Totals = totals) -> None:  # fmt: skip
            timings = Timings(clock)
            sent = exchanges[replica].contribute(
                number,
                base=base,
                gradient=gradients[replica],
                work=LocalWork(tokens=1, steps=1, loss=1.0, compute_s=0.0),
                timings=timings,
            )
            settled = exchanges[replica].settle(
                number, base=base, totals=totals, sent=sent, timings=timings
            )
            assert settled.merged is not None

        seconds.append(together(replicas, synchronise))
    up, down, requests = per_replica(metered, ROUNDS)
    return Row("one payload, gather", replicas, statistics.median(seconds), up, down, requests)


def textbook(uri: str, replicas: int) -> Row:
    sizes = [NUMEL // TENSORS] * TENSORS
    metered = stores(uri, replicas)
    data = bytes(4 * sizes[0])

    def wait_for(store: Store, key: str) -> bytes:
        while True:
            try:
                return store.get(key)
            except MissingKey:
                time.sleep(1.0)

    def synchronise(replica: int) -> None:
        store = metered[replica]
        for tensor in range(TENSORS):
            store.put(f"{tensor}/{replica}", data)
            for peer in range(replicas):
                if peer != replica:
                    wait_for(store, f"{tensor}/{peer}")

    seconds = together(replicas, synchronise)
    up, down, requests = per_replica(metered, 1)
    return Row("object per tensor, 1 s poll", replicas, seconds, up, down, requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="URI of an empty prefix; a temporary folder by default")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--no-baseline", action="store_true", help="skip the slow baseline")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        uri = arguments.store or folder
        rows = [ours(uri, n) for n in arguments.replicas]
        if not arguments.no_baseline:
            with ThreadPoolExecutor(len(arguments.replicas)) as pool:
                rows += pool.map(lambda n: textbook(uri, n), arguments.replicas)
    print(f"one outer sync of {TENSORS} tensors, {NUMEL:,} fp32 parameters, store {uri}")
    print(f"{'':28} {'N':>2} {'seconds':>9} {'up MB':>8} {'down MB':>8} {'requests':>9}", end="")
    print(f" {'formula up, down MB':>20}")
    for row in rows:
        expected = plan_cost.round_cost(
            numel=NUMEL, codec="fp32", replicas=row.replicas, mode="gather"
        )
        print(
            f"{row.name:28} {row.replicas:>2} {row.seconds:>9.3f} {row.up / 1e6:>8.3f} "
            f"{row.down / 1e6:>8.3f} {row.requests:>9.1f} "
            f"{expected.up / 1e6:>9.3f}, {expected.down / 1e6:>9.3f}"
        )
    for slow in rows[len(arguments.replicas) :]:
        fast = next(r for r in rows if r.replicas == slow.replicas)
        print(f"N={slow.replicas}: {slow.seconds / fast.seconds:.0f} times faster")
    return 0


if __name__ == "__main__":
    sys.exit(main())
