"""What a replica trains: the protocol between :mod:`diloco.replica` and a workload.

The replica owns the loop, the clipping, the exchange and the telemetry; a workload owns the model,
the data, the loss and the learning rate. Steps are counted over the run, ``(round - 1) * H + i``
from 0, never over the replica's own life: a replica that joins late is at the learning rate and at
the data position of the others, and nothing of either has to be saved.

Also here: the inner optimizer and schedule that all workloads share. Left out: anything random
without a counter; global random state is neither read nor changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import STDLIB


class HeldOutLoss(NamedTuple):
    """Mean loss in nats per token over ``tokens`` held-out tokens."""

    loss: float
    tokens: int


class Workload(Protocol):
    """One replica's model, data and loss. ``Batch`` is the workload's own; the loop only carries
    it from :meth:`train_batch` to :meth:`loss`."""

    def build_model(self) -> nn.Module:
        """A new model on the workload's device; its weights depend on the group's seed alone."""
        ...

    def inner_optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...

    def lr_at(self, step: int) -> float:
        """Inner learning rate of inner step ``step`` of the run, counted from 0."""
        ...

    def train_batch(self, step: int) -> Any:
        """The batch of this replica's step ``step``: a pure function of (seed, replica, step)."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean nats per token, fp32 scalar on the workload's device, with a graph."""
        ...

    def tokens(self, batch: Any) -> int:
        """Number of tokens the batch's loss is a mean of."""
        ...

    def evaluate(self, model: nn.Module) -> HeldOutLoss:
        """Loss on held-out data that is the same for all replicas and rounds."""
        ...

    def config(self) -> Mapping[str, Any]:
        """What is needed to build the model again: ``config.json`` of the final export."""
        ...

    def sample(
        self, model: nn.Module, prompt: bytes, n: int, *, temperature: float, seed: int
    ) -> bytes:
        """``n`` bytes that go on from ``prompt``, which is not repeated."""
        ...


def first_words(data: str) -> str:
    """What a sample of text goes on from: a function where the data is Python, else a new line."""
    return "def " if data == STDLIB else ""


def random_starts(
    settings: GroupSettings, *, replica: int, step: int, positions: int
) -> npt.NDArray[np.int64]:
    """Where the windows of a batch begin: (batch_size,) int64, each from 0 to ``positions`` - 1.

    The randomness is Philox's raw output under the key (seed, replica) at counter ``step``, which
    no version of NumPy changes.
    """
    key = np.array([settings.seed, replica], np.uint64)
    counter = np.array([0, step, 0, 0], np.uint64)
    random = np.random.Philox(key=key, counter=counter).random_raw(settings.batch_size)
    return (random % np.uint64(positions)).astype(np.int64)


def warmup_cosine(step: int, settings: GroupSettings) -> float:
    """Linear warm-up to ``inner_lr``, then a cosine down to ``min_lr_ratio`` of it.

    The peak is reached at the last warm-up step, the end at the run's last step; after that (a run
    with void rounds takes more) the rate stays where it ended.
    """
    if step < settings.warmup_steps:
        return settings.inner_lr * (step + 1) / settings.warmup_steps
    rest = settings.total_steps - settings.warmup_steps
    progress = min(1.0, (step + 1 - settings.warmup_steps) / max(1, rest))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.inner_lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * cosine)


def adamw(model: nn.Module, settings: GroupSettings) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, never on gains. The caller sets ``lr`` before each step.

    ``fused`` costs a third of the default on a CPU.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.inner_lr,
        betas=(0.9, 0.95),
        fused=fused,
    )
