"""The :class:`Workload` protocol between :mod:`diloco.replica` and a model, its data and its loss.

The replica owns the loop, gradient clipping, the exchange and telemetry. A workload owns the model,
the data, the loss and the learning rate. Steps are counted over the run, ``(round - 1) * H + i``
from 0, not since the process started. So a replica that joins late has the learning rate and data
position of the others, and neither has to be saved.

This module also has the inner optimizer and the schedule that all workloads share. All randomness
is a function of a counter; global random state is neither read nor changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import STDLIB

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class HeldOutLoss(NamedTuple):
    """Mean loss in nats per token over ``tokens`` held-out tokens."""

    loss: float
    tokens: int


class Workload(Protocol):
    """The model, data and loss of one replica. A batch can have any type; the loop only passes it
    from :meth:`train_batch` to :meth:`loss` and :meth:`tokens`.

    Optional: an attribute ``buffers``, the argument of :func:`diloco.join` of that name, and a
    method ``attach``, which is called with the group after the join, on all ranks.
    """

    def build_model(self) -> nn.Module:
        """Create a model on the workload's device; its weights depend only on the group's seed."""
        ...

    def inner_optimizer(self, model: nn.Module) -> Optimizers:
        """Create the inner optimizer, or several that divide the parameters."""
        ...

    def lr_at(self, step: int) -> float:
        """Return the inner learning rate of inner step ``step`` of the run, counted from 0."""
        ...

    def train_batch(self, step: int) -> Any:
        """Return this replica's batch of a step: a pure function of (seed, replica, step), except
        with work units."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss in nats per token: an fp32 scalar on the workload's device that
        requires grad."""
        ...

    def tokens(self, batch: Any) -> int:
        """Return the number of tokens over which :meth:`loss` averages."""
        ...

    def evaluate(self, model: nn.Module) -> HeldOutLoss:
        """Return the loss on held-out data, which is equal for all replicas and rounds."""
        ...

    def config(self) -> Mapping[str, Any]:
        """Return the model configuration: ``config.json`` of the final export."""
        ...


def first_words(data: str) -> str:
    """Return the default prompt: the start of a function for Python sources, else an empty line."""
    return "def " if data == STDLIB else ""


def random_starts(
    settings: GroupSettings, *, replica: int, step: int, positions: int
) -> npt.NDArray[np.int64]:
    """Draw the starts of a batch's windows: (batch_size,) int64, each from 0 to ``positions`` - 1.

    Uses the raw output of Philox for the key (seed, replica) at counter ``step``, which is the same
    in every version of NumPy.
    """
    key = np.array([settings.seed, replica], np.uint64)
    counter = np.array([0, step, 0, 0], np.uint64)
    random = np.random.Philox(key=key, counter=counter).random_raw(settings.batch_size)
    return (random % np.uint64(positions)).astype(np.int64)


def warmup_cosine(step: int, settings: GroupSettings) -> float:
    """Return the learning rate of ``step``: linear warm-up to ``inner_lr``, then a cosine down to
    ``min_lr_ratio * inner_lr``.

    The peak is at the last warm-up step and the minimum at the last step of the run. Later steps (a
    run with void rounds has more) use the minimum.
    """
    if step < settings.warmup_steps:
        return settings.inner_lr * (step + 1) / settings.warmup_steps
    rest = settings.total_steps - settings.warmup_steps
    progress = min(1.0, (step + 1 - settings.warmup_steps) / max(1, rest))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.inner_lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * cosine)


def inner_optimizers(model: nn.Module, settings: GroupSettings) -> Optimizers:
    """Create the inner optimizers that the settings name. The caller sets ``lr`` before each
    step."""
    if settings.inner_optimizer == "muon":
        return muon(model, settings)
    return adamw(model, settings)


def adamw(model: nn.Module, settings: GroupSettings) -> torch.optim.AdamW:
    """Create AdamW with weight decay on matrices only."""
    return _adamw([p for p in model.parameters() if p.requires_grad], settings)


def muon(model: nn.Module, settings: GroupSettings) -> list[torch.optim.Optimizer]:
    """Create Muon for the matrices of hidden layers, and AdamW for all other parameters.

    Muon orthogonalises the update of a matrix (arXiv:2502.16982), which has no meaning for
    embeddings and output layers. Its update is scaled to the size of AdamW's, so that one learning
    rate and one weight decay serve both. Raises :class:`ValueError` for a model without such
    matrices, and if torch is older than 2.9.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"inner_optimizer: expected torch 2.9 or newer for muon, found {torch.__version__}"
        )
    hidden = hidden_matrices(model)
    if not hidden:
        raise ValueError("inner_optimizer: expected a model with hidden matrices, found none")
    chosen = {id(parameter) for parameter in hidden}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    matrices = torch.optim.Muon(
        hidden,
        lr=settings.inner_lr,
        weight_decay=settings.weight_decay,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    return [matrices, _adamw(rest, settings)] if rest else [matrices]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained 2-D parameters that belong neither to an embedding nor to the output layer
    (``get_output_embeddings`` of a Transformers model)."""
    outside: set[int] = set()
    for module in model.modules():
        head = getattr(module, "get_output_embeddings", lambda: None)()
        for part in (module if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None, head):
            if isinstance(part, nn.Module):
                outside.update(id(parameter) for parameter in part.parameters())
    return [
        p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in outside
    ]


def _adamw(parameters: list[nn.Parameter], settings: GroupSettings) -> torch.optim.AdamW:
    """Create AdamW over these parameters. ``fused`` takes a third of the default's time on a
    CPU."""
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
