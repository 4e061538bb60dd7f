"""Error, memory and CPU time of an outer state in bf16, against fp32.

The outer optimizer of the library takes ``--rounds`` steps along synthetic pseudo-gradients: a
slowly turning direction of norm 1e-3 of the weights, and noise of the same size. Every state gets
the same ones. *Error* is the L2 distance of the weights from those of the fp32 state, relative to
the distance that these have moved. *Nearest* is bf16 rounded to the nearest, which the library does
not use. *State* are the bytes that a replica holds in host memory, and a checkpoint stores, for
each parameter.

Usage: python bench/outer_dtypes.py [--numel 4000000] [--rounds 200]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from diloco.model import rounding
from diloco.model.outer_optimizer import OuterOptimizer

FP32, BF16 = torch.float32, torch.bfloat16
STATES = ((FP32, FP32), (FP32, BF16), (BF16, FP32), (BF16, BF16))
CHANGE = 1e-3
"""Norm of a pseudo-gradient relative to the weights."""


def nearest(self: object, values: Tensor, into: Tensor, *, position: int) -> None:
    into.copy_(values)


def trained(
    start: Tensor,
    gradients: Callable[[int], Tensor],
    rounds: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, float, int]:
    """Return the weights in fp32, CPU seconds of a step, and bytes of state for each parameter."""
    outer = OuterOptimizer(lr=0.7, momentum=0.9, numel=start.numel(), dtypes=dtypes)
    weights, cpu_s = start.to(dtypes[0], copy=True), 0.0
    for round in range(1, rounds + 1):
        gradient = gradients(round)
        began_s = time.process_time()
        outer.step(weights, gradient, round=round)
        cpu_s += time.process_time() - began_s
    vectors = (weights, *outer.vectors.values())
    return weights.float(), cpu_s / rounds, sum(vector.element_size() for vector in vectors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeded = torch.Generator().manual_seed(0)
    start = torch.randn(given.numel, generator=seeded).mul_(0.02)
    towards = torch.randn(given.numel, generator=seeded).mul_(0.02 * CHANGE)
    away = torch.randn(given.numel, generator=seeded).mul_(0.02 * CHANGE)

    def gradients(round: int) -> Tensor:
        share = round / given.rounds
        noise = torch.randn(given.numel, generator=torch.Generator().manual_seed(round))
        return towards.mul(1 - share).add_(away.mul(share)).add_(noise.mul_(0.02 * CHANGE))

    print("| weights | momentum | rounding | error | state, bytes | CPU, ms per step and million |")
    print("| --- | --- | --- | ---: | ---: | ---: |", flush=True)
    exact: Tensor | None = None
    stored = rounding.RandomRounding.store
    for name, store in (("random", stored), ("nearest", nearest)):
        rounding.RandomRounding.store = store  # type: ignore[method-assign]
        for dtypes in STATES:
            if exact is not None and dtypes == (FP32, FP32):
                continue
            weights, cpu_s, size = trained(start, gradients, given.rounds, dtypes)
            exact = weights if exact is None else exact
            moved = float((exact - start).norm())
            error = float((weights - exact).norm()) / moved
            names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
            how = "" if dtypes == (FP32, FP32) else name
            speed = 1000 * cpu_s / (given.numel / 1e6)
            print(
                f"| {' | '.join(names)} | {how} | {error:.2%} | {size} | {speed:.1f} |", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
