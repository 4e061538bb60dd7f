"""The CUDA paths of a replica: inner steps in bf16, weights between GPU and host, codecs.

Needs a GPU; without one it prints a notice and exits with status 0. Also trains two replicas that
share the GPU through a folder for a few rounds, and checks that both end with the same bits.

Usage: python bench/gpu_paths.py [--size base]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.support.segments import every_segment
from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.payload import PayloadInfo, PayloadWriter
from diloco.init import create_group
from diloco.model.flat_parameters import Layout
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import OuterOptimizer, WeightedSum, digest, l2_norm
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Segment
from diloco.protocol.workload import ByteGPTWorkload
from diloco.store.base import LocalStore
from diloco.training.final_result import read_final
from diloco.workloads import load_workload

ROOT = Path(__file__).resolve().parent.parent


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
    weights(model)


def weights(model: torch.nn.Module) -> None:
    layout = Layout(model)
    size = 4 * layout.numel
    read_s = seconds(layout.read)
    vector = layout.read()
    assert vector.is_pinned()
    pageable = torch.empty(layout.numel)
    on_gpu = vector.cuda()
    pageable_s = seconds(lambda: pageable.copy_(on_gpu))
    print(
        f"weights GPU -> host, {size / 1e6:.0f} MB: {size / read_s / 1e9:.1f} GB/s, pinning "
        f"included; one pageable copy {size / pageable_s / 1e9:.1f} GB/s"
    )
    write_s = seconds(lambda: layout.write(vector))
    print(f"weights host -> GPU: {size / write_s / 1e9:.1f} GB/s")
    codecs(vector.clone(), layout.slots)


def codecs(vector: torch.Tensor, slots: Sequence[Slot]) -> None:
    size, clock = 4 * vector.numel(), SystemClock()
    on_gpu = vector.cuda()
    for name in ("fp32", "bf16", "int8", "e3m0", "topk"):
        codec = get_codec(name)
        info = PayloadInfo(
            round=1,
            fragment=0,
            replica=0,
            incarnation="00001-00000000",
            codec=name,
            numel=vector.numel(),
        )
        cpu_s = seconds(lambda codec=codec: codec.encode(vector))
        gpu_s = seconds(lambda codec=codec: codec.encode(on_gpu))
        same = torch.equal(codec.encode(on_gpu).cpu(), codec.encode(vector))
        packing = PayloadWriter(info, vector, codec, slots, clock=clock)
        pack_s = seconds(lambda packing=packing: deque(packing.parts(), maxlen=0))
        print(
            f"codec {name}: encode CPU {size / cpu_s / 1e9:.1f} GB/s, GPU "
            f"{size / gpu_s / 1e9:.0f} GB/s, {'the same' if same else 'OTHER'} bits; packed on "
            f"the CPU, checksums and norms included, {size / pack_s / 1e9:.2f} GB/s"
        )
    outer = OuterOptimizer(lr=0.7, momentum=0.9, numel=vector.numel())
    target, total = vector.clone(), WeightedSum(torch.empty(vector.numel()))
    step_s = seconds(lambda: outer.step(target, vector))
    sum_s = seconds(lambda: [total.add(0, vector, 0.5) for _ in range(2)])
    print(
        f"outer step {step_s * 1e3:.0f} ms, sum of two {sum_s * 1e3:.0f} ms, "
        f"norm {seconds(lambda: l2_norm(vector)) * 1e3:.0f} ms, "
        f"digest {seconds(lambda: digest(vector)) * 1e3:.0f} ms"
    )


def two_replicas() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = GroupSettings(
            num_replicas=2,
            sync_every=100,
            total_rounds=5,
            warmup_steps=100,
            inner_lr=1e-3,
            batch_size=32,
            codec="bf16",
        )
        create_group(folder, settings, workload=ByteGPTWorkload(size="mini").to_dict())
        replicas = [
            subprocess.Popen(
                [sys.executable, "-m", "diloco.replica", folder],
                env=os.environ | {"REPLICA_RANK": str(replica), "PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for replica in range(2)
        ]
        for process in replicas:
            _, errors = process.communicate(timeout=400)
            if process.returncode:
                raise SystemExit(errors[-3000:])
        store = LocalStore(Path(folder))
        segments = list(map(Segment.from_bytes, every_segment(store)))
        digests: dict[int, set[str]] = {}
        for segment in segments:
            for report in segment.rounds:
                digests.setdefault(report.round, set()).add(report.weights_digest)
        assert all(len(found) == 1 for found in digests.values()), digests
        evaluations = sorted((e.round, e.loss) for segment in segments for e in segment.evaluations)
        final = read_final(store)
        assert final is not None
        print(
            f"two replicas on one GPU, 5 rounds of 100 steps: loss "
            f"{' '.join(f'{loss:.3f}' for _, loss in evaluations)}; the global weights of both "
            f"are bit-identical in all {len(digests)} rounds"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="base")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    inner_steps(arguments.size)
    two_replicas()
    return 0


if __name__ == "__main__":
    sys.exit(main())
