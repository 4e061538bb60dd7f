"""CPU time and peak memory of a payload's path through each codec.

*Pack* makes the parts of an upload from a pseudo-gradient: encode, checksums, norms. *Unpack*
verifies and decodes the parts of a download, slice by slice, and adds them to a sum. *Mean* decodes
a reduced shard into the merged fragment. One thread, whose CPU time is taken; the best of
``--repeat``. *Memory* is the growth of the resident set at its peak while parts are made and
dropped one by one, and while a part is decoded.

Usage: python bench/codec_copies.py [--numel N] [--repeat R] [--codec C ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.support.memory import reset_peak, resident
from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.checked_blocks import decode_body, raw
from diloco.exchange.payload import PayloadInfo, PayloadWriter, slices
from diloco.exchange.payload_reader import codec_parts
from diloco.model.fragments import Slot, Table
from diloco.model.outer_optimizer import WeightedSum
from diloco.protocol.blocks import HEADER_BYTES, Span

CODECS = ("fp32", "bf16", "int8", "e3m0", "topk")


def cpu_s(work: Callable[[], object], repeat: int) -> float:
    """The least CPU seconds of the calling thread."""
    found = []
    for _ in range(repeat):
        begin = time.thread_time()
        work()
        found.append(time.thread_time() - begin)
    return min(found)


def growth_mib(work: Callable[[], object]) -> float:
    work()  # what the first call loads
    before = reset_peak()
    work()
    return (resident("VmHWM") - before) / 2**20


def measure(name: str, numel: int, repeat: int) -> list[float]:
    codec = get_codec(name)
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    slots = Table(
        [Slot(name="t", shape=(numel,), dtype="float32", numel=numel)], fragments=1, pattern="size"
    ).slots
    info = PayloadInfo(
        round=1, fragment=0, replica=0, incarnation="00001-00000000", codec=name, numel=numel
    )

    def writer() -> PayloadWriter:
        return PayloadWriter(info, vector, codec, slots, clock=SystemClock(), exact_norms=False)

    packing = writer()
    data = memoryview(b"".join(packing.parts()))[HEADER_BYTES:]
    parts = codec_parts(Span(0, numel), numel, codec)
    total = WeightedSum(torch.empty(numel))

    def pack() -> None:
        for _ in writer().parts():
            pass

    def bytes_of(span: Span) -> memoryview:
        start = packing.blocks.size_bytes(span.start)
        return data[start : start + packing.blocks.size_bytes(span.numel)]

    def unpack() -> None:
        for part in parts:
            for where in slices(part, numel):
                total.add(where.start, packing.blocks.decode(bytes_of(where), where), 0.5)

    mean = get_codec("bf16" if name == "bf16" else "fp32")
    encoded = bytes(raw(mean.encode(vector)))

    def put_mean() -> None:
        for part in codec_parts(Span(0, numel), numel, mean):
            start, stop = mean.encoded_bytes(part.start), mean.encoded_bytes(part.stop)
            merged = total.total[part.start : part.stop]
            decode_body(memoryview(encoded)[start:stop], part.numel, mean, merged)

    times = [cpu_s(work, repeat) for work in (pack, unpack, put_mean)]
    return [4 * numel / 1e9 / one for one in times] + [
        growth_mib(work) for work in (pack, unpack, put_mean)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=2**25)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=[*CODECS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| codec | pack, GB/s | unpack | mean | memory of pack, MiB | unpack | mean |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in given.codec:
        found = measure(name, given.numel, given.repeat)
        cells = [f"{one:.2f}" for one in found[:3]] + [f"{one:.0f}" for one in found[3:]]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
