"""Define a custom workload: model, data and loss for classifying points on two spirals.

    python -m diloco.init runs/spirals --workload examples/custom_workload/workload.json \\
        --num-replicas 2 --sync-every 20 --total-rounds 15 --warmup-steps 0 \\
        --inner-lr 0.01 --batch-size 64
    PYTHONPATH=examples/custom_workload REPLICA_RANK=0 python -m diloco.replica runs/spirals
    PYTHONPATH=examples/custom_workload REPLICA_RANK=1 python -m diloco.replica runs/spirals

One point counts as one token, so the loss is in nats per point; guessing gives ln 2 = 0.69. In the
dashboard, upload this folder as a zip.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diloco.protocol.settings import GroupSettings
from diloco.workloads.base import HeldOutLoss, adamw, warmup_cosine

HELD_OUT = 2**31
"""In place of a replica number for the held-out points, on which no replica trains."""


def build(
    *,
    seed: int,
    replica: int,
    device: torch.device,
    total_steps: int,
    settings: GroupSettings,
    arguments: Mapping[str, Any],
) -> Spirals:
    """Return the workload of one replica. ``arguments`` can set ``width`` and ``turns``."""
    return Spirals(
        seed=seed,
        replica=replica,
        device=device,
        settings=settings,
        width=int(arguments.get("width", 64)),
        turns=float(arguments.get("turns", 1.5)),
    )


class Spirals:
    """The workload of one replica. A batch is a function of (seed, replica, step)."""

    def __init__(
        self,
        *,
        seed: int,
        replica: int,
        device: torch.device,
        settings: GroupSettings,
        width: int,
        turns: float,
    ) -> None:
        self._seed = seed
        self._replica = replica
        self._device = device
        self._settings = settings
        self._width = width
        self._turns = turns

    def build_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            model = nn.Sequential(
                nn.Linear(2, self._width), nn.SiLU(),
                nn.Linear(self._width, self._width), nn.SiLU(),
                nn.Linear(self._width, 1),
            )  # fmt: skip
        return model.to(self._device)

    def inner_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model, self._settings)

    def lr_at(self, step: int) -> float:
        return warmup_cosine(step, self._settings)

    def train_batch(self, step: int) -> dict[str, Tensor]:
        return self._points(self._replica, step, self._settings.batch_size)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["points"]).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["spiral"])

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        return len(batch["spiral"])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> HeldOutLoss:
        batch = self._points(HELD_OUT, 0, 1024)
        return HeldOutLoss(self.loss(model, batch).item(), self.tokens(batch))

    def config(self) -> Mapping[str, Any]:
        return {"model": "spirals", "width": self._width}

    def _points(self, replica: int, step: int, count: int) -> dict[str, Tensor]:
        """``points`` (count, 2) and ``spiral`` (count,), 0 or 1, both fp32."""
        random = np.random.default_rng([self._seed, replica, step])
        spiral = random.integers(0, 2, count)
        radius = random.uniform(0.1, 1.0, count)
        angle = 2 * np.pi * self._turns * radius + np.pi * spiral
        points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        points += random.normal(0.0, 0.01, points.shape)
        return {
            "points": torch.tensor(points, dtype=torch.float32, device=self._device),
            "spiral": torch.tensor(spiral, dtype=torch.float32, device=self._device),
        }
