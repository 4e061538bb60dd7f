"""Encode and decode per core, checksums included, with what each codec saves and what it loses.

A vector is encoded block by block; each block's bytes are hashed as on upload, hashed again as on
download, and decoded. One thread, whose CPU time is taken, so that other processes count little. GB
are of fp32 input, whatever the codec makes of it; "both" is the input over the time of all four
steps. The errors are relative L2 errors, on normal data and on Student's t with 3 degrees of
freedom.

Usage: python bench/codec_speed.py [--numel N] [--block ELEMENTS] [--repeats R]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import xxhash
from torch import Tensor

from diloco.codecs import Codec, get_codec

CODECS = ("fp32", "bf16", "int8", "e3m0", "topk")
TARGETS = {"bf16": 1.0, "int8": 0.5}
"""GB/s per core of "both"."""


@dataclass(frozen=True)
class Speed:
    """CPU seconds of the one thread for the whole vector; ``hash_*`` are the checksums."""

    encode: float
    hash_up: float
    hash_down: float
    decode: float


def measure(codec: Codec, vector: Tensor, *, block: int, repeats: int) -> Speed:
    """Medians of ``repeats`` passes after one that warms up."""
    passes = [one_pass(codec, vector, block=block) for _ in range(repeats + 1)][1:]
    return Speed(*(statistics.median(times) for times in zip(*passes, strict=True)))


def one_pass(codec: Codec, vector: Tensor, *, block: int) -> list[float]:
    received = torch.empty(codec.encoded_bytes(block), dtype=torch.uint8)
    totals = [0.0] * 4
    for start in range(0, vector.numel(), block):
        piece = vector[start : start + block]
        marks = [time.thread_time()]
        body = codec.encode(piece)
        marks.append(time.thread_time())
        xxhash.xxh3_64_intdigest(body.numpy().data)
        marks.append(time.thread_time())
        here = received[: body.numel()]
        here.copy_(body)  # as if it had come over the network
        marks.append(time.thread_time())
        xxhash.xxh3_64_intdigest(here.numpy().data)
        marks.append(time.thread_time())
        codec.decode(here, piece.numel())
        marks.append(time.thread_time())
        encode, hash_up, _, hash_down, decode = (b - a for a, b in pairwise(marks))
        for index, seconds in enumerate((encode, hash_up, hash_down, decode)):
            totals[index] += seconds
    return totals


def error(codec: Codec, vector: Tensor) -> float:
    decoded = codec.decode(codec.encode(vector), vector.numel())
    return float((decoded - vector).norm() / vector.norm())


def rate(size_gb: float, seconds: float) -> str:
    """GB/s; fp32 is a view and takes no time."""
    return f"{size_gb / seconds:.2f}" if size_gb < 500 * seconds else "free"


def student(numel: int, *, degrees: int, generator: torch.Generator) -> Tensor:
    chi_squared = torch.randn(degrees, numel, generator=generator).square().mean(0)
    return torch.randn(numel, generator=generator) / chi_squared.sqrt()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--numel", type=int, default=2**26)
    parser.add_argument("--block", type=int, default=2**20, help="elements")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(options.numel, generator=generator)
    sample = vector[: 2**24]
    heavy = student(sample.numel(), degrees=3, generator=generator)

    size_gb = 4 * options.numel / 1e9
    print(
        f"{options.numel:,} values in blocks of {options.block:,}, one thread, CPU capability "
        f"{torch.backends.cpu.get_cpu_capability()}; GB/s of fp32 input\n"
    )
    print(
        "| codec | smaller | encode | + checksum | decode | + checksum | both | target "
        "| error, normal | error, Student |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in CODECS:
        codec = get_codec(name)
        speed = measure(codec, vector, block=options.block, repeats=options.repeats)
        up, down = speed.encode + speed.hash_up, speed.hash_down + speed.decode
        cells = [rate(size_gb, seconds) for seconds in (speed.encode, up, speed.decode, down)]
        ratio = 4 * options.numel / codec.encoded_bytes(options.numel)
        print(
            f"| {name} | {ratio:.2f} x | {' | '.join(cells)} | **{size_gb / (up + down):.2f}** "
            f"| {TARGETS.get(name, '')} | {error(codec, sample):.5f} "
            f"| {error(codec, heavy):.5f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
