"""The CUDA paths of a replica: inner steps in bf16, weights between GPU and host, codecs.

Needs a GPU; without one it prints a notice and exits with status 0. Also trains replicas that share
the GPU through a folder for a few rounds, some of them sharded with FSDP2, and checks that all have
the same global weights, bit by bit. The codecs of the GPU must give the bytes of the CPU.

Usage: python bench/gpu_paths.py [--size base] [--numel 1073741824] [--parts steps weights ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.support.segments import every_segment
from diloco.codecs import Codec, get_codec
from diloco.group import join
from diloco.init import create_group
from diloco.model.flat_parameters import Layout
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Segment
from diloco.protocol.workload import ByteGPTWorkload
from diloco.replica import Rank, train
from diloco.store.base import LocalStore
from diloco.workloads import load_workload
from tests.emulators.serving import free_ports

ROOT = Path(__file__).resolve().parent.parent
TENSORS = 64
PIECE = 2**22
"""Elements that the GPU encodes at a time."""
PARTS = ("steps", "weights", "codecs", "replicas", "ranks")


def seconds(work: Callable[[], object], *, repeat: int = 5) -> float:
    """Best of ``repeat``, the GPU included."""
    best = float("inf")
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def inner_steps(size: str) -> None:
    document = GroupDocument(
        run_id="bench",
        name="bench",
        settings=GroupSettings(batch_size=16),
        workload=ByteGPTWorkload(size=size).to_dict(),
    )
    workload = load_workload(document, replica=0, device="cuda")
    model = workload.build_model()
    optimizer = workload.inner_optimizer(model)

    def step(number: int = 0) -> None:
        batch = workload.train_batch(number)
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for number in range(3):
        step(number)
    step_s = seconds(step, repeat=20)
    batch = workload.train_batch(0)
    parameters = sum(p.numel() for p in model.parameters())
    tokens_s = workload.tokens(batch) / step_s
    print(
        f"inner step, {size}, {parameters:,} parameters, bf16 autocast: "
        f"{step_s * 1e3:.1f} ms, {tokens_s:,.0f} tokens/s, "
        f"{6 * parameters * tokens_s / 1e12:.0f} TFLOP/s by 6 N D"
    )


def weights(numel: int) -> None:
    """Copies between a model of ``numel`` parameters in bf16 on the GPU and the host."""
    shape = (numel // TENSORS,)
    model = torch.nn.ParameterList(
        torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(TENSORS)
    )
    layout = Layout(model)
    size = 4 * layout.numel
    base = layout.read()
    into = torch.empty_like(base)
    with torch.no_grad():
        for parameter in model:
            parameter.mul_(0.99)
    locals_ = torch.cat([parameter.detach() for parameter in model]).float().cpu()
    layout.put_progress(into, base, add=False)
    assert torch.equal(into, locals_ - base), "the bits of the CPU"
    whole = torch.empty(layout.numel, device="cuda")
    pinned_s = seconds(lambda: torch.empty_like(base, pin_memory=True).copy_(whole), repeat=2)
    pageable_s = seconds(lambda: into.copy_(whole))
    layout.read()
    rows = {
        "read: GPU to host as fp32": seconds(layout.read),
        "one pageable copy of the same bytes": pageable_s,
        "one copy of the same bytes into pinned memory": pinned_s,
        "put_progress: read, minus the base": seconds(
            lambda: layout.put_progress(into, base, add=False)
        ),
        "write: host to GPU, as bf16": seconds(lambda: layout.write(base)),
        "one pageable copy of fp32 to the GPU": seconds(lambda: whole.copy_(base)),
    }
    layout.write(base)
    assert torch.equal(layout.read(), base.bfloat16().float())
    print(f"{layout.numel:,} parameters in bf16, {torch.get_num_threads()} threads:")
    for title, found_s in rows.items():
        print(f"  {title}: {found_s:.2f} s, {size / found_s / 1e9:.1f} GB/s of fp32")


def codecs(numel: int) -> None:
    """Encode a vector of the host there and on the GPU, transfers included. Raises
    :class:`SystemExit` unless both give the same bytes."""
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    vector[: numel // 3] *= torch.rand(numel // 3) ** 8  # rows of unlike size
    for name in ("bf16", "int8", "e3m0", "topk"):
        codec = get_codec(name)
        body, expected = (
            torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8) for _ in range(2)
        )

        def on_gpu(codec: Codec = codec, body: Tensor = body) -> None:
            for start in range(0, numel, PIECE):
                stop = min(start + PIECE, numel)
                encoded = codec.encode(vector[start:stop].cuda())
                body[codec.encoded_bytes(start) : codec.encoded_bytes(stop)].copy_(encoded)

        rates = [4e-9 * numel / seconds(on_gpu, repeat=3)]
        for threads in (1, 8):
            torch.set_num_threads(threads)
            rates.append(4e-9 * numel / seconds(partial(codec.encode, vector, expected), repeat=2))
        print(
            f"codec {name}: GB/s of fp32 encoded on the GPU {rates[0]:.2f}, with 1 thread of the "
            f"CPU {rates[1]:.2f}, with 8 {rates[2]:.2f}"
        )
        if not torch.equal(body, expected):
            raise SystemExit(f"{name}: expected the bytes of the CPU, found others")


@contextmanager
def small_group(
    replicas: int, *, codec: str, sync_every: int, total_rounds: int
) -> Iterator[tuple[str, GroupSettings]]:
    """Create a group that trains the smallest built-in model in a temporary folder."""
    settings = GroupSettings(
        num_replicas=replicas,
        min_quorum=replicas,
        sync_every=sync_every,
        total_rounds=total_rounds,
        warmup_steps=sync_every,
        inner_lr=1e-3,
        batch_size=32,
        codec=codec,
        grace_s=120.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        create_group(folder, settings, workload=ByteGPTWorkload(size="mini").to_dict())
        yield folder, settings


RANKS = {0: ("gloo", 2), 1: ("cpu:gloo,cuda:nccl", 1), 2: ("", 1)}
"""Backend and ranks of each replica: DistributedDataParallel of two ranks on one GPU, which NCCL
refuses, FSDP2 with NCCL on one rank, and a plain model."""


def replicas_of_ranks(codec: str) -> None:
    """Train replicas that divide their model differently, and compare their global weights."""
    with small_group(len(RANKS), codec=codec, sync_every=50, total_rounds=4) as (folder, settings):
        commands = [
            (
                [__file__, "--rank-of", str(replica), folder],
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for port, (replica, (_, ranks)) in zip(
                free_ports(len(RANKS)), RANKS.items(), strict=True
            )
            for rank in range(ranks)
        ]
        run(commands, folder)
        compare(folder, settings, f"replicas of 2, 1 and 1 ranks, {codec}")


def run(commands: list[tuple[list[str], dict[str, str]]], folder: str) -> None:
    """Run programs of this Python at the same time. Raises :class:`SystemExit` if one fails."""
    processes = []
    try:
        for number, (command, environment) in enumerate(commands):
            with Path(f"{folder}.{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
                        stdout=log,
                        stderr=log,
                    )
                )
        statuses = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [Path(f"{folder}.{number}.log") for number in range(len(commands))]
    texts = [log.read_text(errors="replace")[-2000:] for log in logs]
    for log in logs:
        log.unlink()
    if any(statuses):
        raise SystemExit(
            "\n".join(f"status {s}: {t}" for s, t in zip(statuses, texts, strict=True))
        )


def train_rank(replica: int, uri: str) -> None:
    """Train as one rank of a replica."""
    backend, ranks = RANKS[replica]
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = LocalStore(Path(uri))
    document = GroupDocument.from_bytes(store.get(keys.GROUP))
    workload = load_workload(document, replica=replica, device=device)
    model = workload.build_model()
    rank = Rank()
    if backend:
        dist.init_process_group(backend)
        rank = Rank(dist.get_rank(), ranks)
        if ranks == 1:
            model = fully_shard(model, mesh=init_device_mesh("cuda", (ranks,)))
        else:
            model = DistributedDataParallel(model)
    with join(
        uri, model=model, inner_optimizer=workload.inner_optimizer(model), replica=replica
    ) as group:
        train(group, workload, model, rank)
    if backend:
        dist.destroy_process_group()


def two_replicas(*codecs: str) -> None:
    """Train two replicas of the built-in program on one GPU, with each codec."""
    for codec in codecs:
        with small_group(2, codec=codec, sync_every=100, total_rounds=5) as (folder, settings):
            command = ["-m", "diloco.replica", folder]
            run([(command, {"REPLICA_RANK": str(replica)}) for replica in range(2)], folder)
            compare(folder, settings, f"two replicas, {codec}")


def compare(folder: str, settings: GroupSettings, title: str) -> None:
    """Raise :class:`SystemExit` unless all replicas had the same global weights in every round."""
    store = LocalStore(Path(folder))
    segments = list(map(Segment.from_bytes, every_segment(store)))
    reports: dict[int, set[tuple[int, str]]] = {}
    for segment in segments:
        for report in segment.rounds:
            reports.setdefault(report.round, set()).add((segment.replica, report.weights_digest))
    for round in range(1, settings.total_rounds + 1):
        found = sorted(reports.get(round, ()))
        digests = {digest for _, digest in found}
        replicas = [replica for replica, _ in found]
        if replicas != list(range(settings.num_replicas)) or len(digests) != 1 or "" in digests:
            raise SystemExit(f"{title}: expected one digest of round {round}, found {found}")
    evaluations = sorted((e.round, e.loss) for segment in segments for e in segment.evaluations)
    print(
        f"{title}: held-out loss {' '.join(f'{loss:.3f}' for _, loss in evaluations)}; the global "
        f"weights are bit-identical in all {settings.total_rounds} rounds"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="base", help="of the built-in model")
    parser.add_argument("--numel", type=int, default=2**30, help="parameters of the other model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="all by default")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("uri", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        train_rank(arguments.rank_of, arguments.uri)
        return 0
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = 0
    parts: dict[str, Callable[[], None]] = {
        "steps": lambda: inner_steps(arguments.size),
        "weights": lambda: weights(arguments.numel),
        "codecs": lambda: codecs(arguments.numel // 8),
        "replicas": lambda: two_replicas("bf16", "e3m0"),
        "ranks": lambda: replicas_of_ranks("int8"),
    }
    for name in arguments.parts or parts:
        try:
            parts[name]()
        except (Exception, SystemExit):
            failed = 1
            traceback.print_exc()
        torch.cuda.empty_cache()
        sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(main())
