"""What the choices inside the codecs cost: how E3M0 rounds, and in what top-k keeps its values.

E3M0: *error* is the relative L2 error, *gain* the factor by which the decoded vector is longer or
shorter along the true one. Noise averages out over replicas, a gain other than one does not.
Top-k: 64 of 4096 values kept in bf16 (256 bytes a chunk) or in int8 with a scale (196 bytes).

Usage: python bench/codec_error.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NUMEL = 2**22
LEVELS = torch.tensor([0.0] + [2.0**-exponent for exponent in range(6, -1, -1)])


def samples() -> dict[str, Tensor]:
    torch.manual_seed(0)
    normal = torch.randn(NUMEL)
    rows = torch.randn(NUMEL // 128, 128) * torch.exp(2 * torch.randn(NUMEL // 128, 1))
    return {
        "normal": normal,
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((NUMEL,)),
        "Student, 3": torch.distributions.StudentT(3.0).sample((NUMEL,)),
        "Student, 1.5": torch.distributions.StudentT(1.5).sample((NUMEL,)),
        "rows of unlike size": rows.flatten(),
    }


def e3m0(vector: Tensor, up_from: float | None) -> tuple[float, float]:
    """(error, gain) when values are rounded up from ``up_from`` times a level, or by chance."""
    rows = vector.view(-1, 256)
    scale = rows.abs().amax(1, keepdim=True)
    magnitude = rows.abs() / scale
    if up_from is None:
        above = torch.bucketize(magnitude, LEVELS).clamp(1, 7)
        low, high = LEVELS[above - 1], LEVELS[above]
        up = torch.rand_like(magnitude) < (magnitude - low) / (high - low)
        decoded = torch.where(up, high, low)
    else:
        thresholds = torch.cat([torch.tensor([2.0**-7]), LEVELS[1:-1] * up_from])
        decoded = LEVELS[torch.bucketize(magnitude, thresholds, right=True)]
    decoded = decoded * scale * rows.sign()
    return error(decoded, rows), float((decoded * rows).sum() / rows.square().sum())


def error(decoded: Tensor, true: Tensor) -> float:
    return float((decoded - true).norm() / true.norm())


def top_k(vector: Tensor, *, topk: int = 64) -> tuple[float, float, float]:
    """Relative L2 errors of keeping the values exactly, in bf16 and in int8."""
    rows = vector.view(-1, 4096)
    indices = rows.abs().topk(topk, dim=1).indices
    kept = rows.gather(1, indices)
    scale = kept.abs().amax(1, keepdim=True) / 127
    forms = (kept, kept.bfloat16().float(), (kept / scale).round() * scale)
    exact, bf16, int8 = (
        error(torch.zeros_like(rows).scatter(1, indices, form), rows) for form in forms
    )
    return exact, bf16, int8


def main() -> None:
    rounding = {
        "nearest, 1.5": 1.5,
        "4/e": 4 / math.e,
        "ours, 1.453125": 1.453125,
        "logarithm, sqrt 2": math.sqrt(2),
        "by chance": None,
    }
    data = samples()
    print("| E3M0: error / gain | " + " | ".join(rounding) + " |")
    print("| --- " * (len(rounding) + 1) + "|")
    for name, vector in data.items():
        cells = ["{:.4f} / {:.4f}".format(*e3m0(vector, up)) for up in rounding.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| top-k: error | kept exactly | in bf16 | in int8 |\n| --- | --- | --- | --- |")
    for name, vector in data.items():
        print(f"| {name} | {' | '.join(f'{e:.5f}' for e in top_k(vector))} |")


if __name__ == "__main__":
    main()
