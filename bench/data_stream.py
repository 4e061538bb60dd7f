"""Token shards beside text in memory: memory at ten times the data, speed of training, raw store.

*memory*: a process that reads a whole epoch, of ``--mib`` and of ten times that, in shards of
``--shard-mib``; printed is how far its peak resident set (VmHWM) grows after the first sample. A
reader holds eight shards, so the smaller data must have many more for its figure to be the limit.
*store*: the CPU seconds for each GiB of an epoch beside those of raw GETs of the same objects by
four threads, and both rates. *train*: tokens per CPU second of the demo model on shards beside
random windows in memory, in turns.

Usage: python bench/data_stream.py [--mib 64] [--shard-mib 1] [--store s3://bucket/prefix]
    [--steps 120]
Without ``--store`` the shards are in a temporary folder.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from diloco.data import TokenShards
from diloco.data.shard_index import INDEX, ShardIndex, dtype_of, read_index
from diloco.data.shard_reader import patient
from diloco.data.shard_writer import PartWriter
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import BYTES, VOCABULARY, ByteGPTWorkload
from diloco.store.open import open_store
from diloco.workloads.byte_gpt import ByteGPTTraining
from diloco.workloads.sharded import RandomWindows, TrainingData, load_shards

MIB = 1 << 20
CONTEXT = 1024


def write(uri: str, mib: int, *, vocabulary: int, shard_mib: int) -> None:
    """Write random shards of ``mib`` in total."""
    store, dtype = patient(open_store(uri)), dtype_of(vocabulary)
    rng = np.random.default_rng(0)
    tokens = shard_mib * MIB // dtype.itemsize
    writer = PartWriter(store, 0, dtype=dtype, shard_tokens=tokens)
    for _ in range(mib // shard_mib):
        writer.add(rng.integers(0, vocabulary, tokens, dtype), split="train", ends=True)
    writer.add(rng.integers(0, vocabulary, 1 << 18, dtype), split="held_out", ends=True)
    part = writer.close()
    index = ShardIndex(
        tokenizer=BYTES,
        tokenizer_digest=BYTES,
        vocabulary=vocabulary,
        end=None,
        train=part.train,
        held_out=part.held_out,
    )
    store.put(INDEX, index.to_bytes())


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cpu_s() -> float:
    return time.process_time()


def read_epoch(uri: str) -> None:
    """Child process: read an epoch; print the growth of the peak, samples, CPU and wall seconds."""
    dataset = TokenShards(uri, context=CONTEXT)
    samples = iter(dataset)
    next(samples)
    before, begun_cpu_s, begun_s, count = peak_mib(), cpu_s(), time.perf_counter(), 1
    while dataset.epoch == 0:
        next(samples)
        count += 1
    print(peak_mib() - before, count, cpu_s() - begun_cpu_s, time.perf_counter() - begun_s)


def in_child(uri: str) -> tuple[float, float, float, float]:
    out = subprocess.run(
        [sys.executable, __file__, "--read", uri], check=True, capture_output=True, text=True
    ).stdout.split()
    growth, count, cpu, wall = map(float, out)
    return growth, count, cpu, wall


def memory_and_store(root: str, mib: int, shard_mib: int) -> None:
    print(f"{'data':>10} {'growth':>10} {'CPU s/GiB':>10} {'MiB/s':>8}")
    for size in (mib, 10 * mib):
        uri = f"{root}/{size}"
        write(uri, size, vocabulary=50_257, shard_mib=shard_mib)
        growth, _, cpu, wall = in_child(uri)
        print(f"{size:>6} MiB {growth:>6.1f} MiB {cpu / size * 1024:>10.2f} {size / wall:>8.0f}")
    store = patient(open_store(uri))
    names = [shard.name for shard in read_index(store).train]
    begun_cpu_s, begun_s = cpu_s(), time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        for data in threads.map(store.get, names):
            assert data
    cpu, wall = cpu_s() - begun_cpu_s, time.perf_counter() - begun_s
    print(f"{'raw GETs':>10} {'':>10} {cpu / size * 1024:>10.2f} {size / wall:>8.0f}")


def train(root: str, steps: int) -> None:
    """Train in turns of 20 steps on both sources."""
    torch.set_num_threads(1)
    settings = GroupSettings(num_replicas=1, max_replicas=1, batch_size=8)
    workload = ByteGPTWorkload()
    context = workload.shape.context
    uri = f"{root}/train"
    write(uri, 64, vocabulary=VOCABULARY, shard_mib=4)
    shards, held_out = load_shards(
        uri,
        settings,
        replica=0,
        context=context,
        eval_tokens=1024,
        vocabulary=VOCABULARY,
        digest=BYTES,
        coverage="replica",
    )
    text = np.random.default_rng(0).integers(0, VOCABULARY, 64 * MIB, np.uint8)
    sources: dict[str, TrainingData] = {
        "memory": RandomWindows(text, settings, replica=0, context=context),
        "shards": shards,
    }
    spent = dict.fromkeys(sources, 0.0)
    trainings = {}
    for name, source in sources.items():
        training = ByteGPTTraining(workload, settings, source, held_out, device=torch.device("cpu"))
        model = training.build_model()
        trainings[name] = (training, model, training.inner_optimizer(model))
    turn = 20
    for first in range(0, steps, turn):
        for name, (training, model, optimizer) in trainings.items():
            assert isinstance(optimizer, torch.optim.Optimizer)
            begun_s = cpu_s()
            for step in range(first, first + turn):
                loss = training.loss(model, training.train_batch(step))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            spent[name] += (cpu_s() - begun_s) if first else 0.0  # the first turn warms up
    tokens = (steps - turn) * settings.batch_size * context
    for name, seconds in spent.items():
        print(f"{name:>10} {tokens / seconds:>10,.0f} tokens per CPU second")
    print(f"{'ratio':>10} {spent['memory'] / spent['shards']:>10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--shard-mib", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--store", default="")
    parser.add_argument("--read", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read_epoch(arguments.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.store or folder
        memory_and_store(root, arguments.mib, arguments.shard_mib)
        train(root, arguments.steps)


if __name__ == "__main__":
    main()
