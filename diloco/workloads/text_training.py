"""The parts that the built-in language models share: optimizer, schedule, data and precision."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from diloco.data.group_units import UnitGroup
from diloco.protocol.settings import GroupSettings
from diloco.workloads.base import Optimizers, first_words, inner_optimizers, warmup_cosine
from diloco.workloads.sharded import TrainingData, UnitSamples


class TextTraining:
    """Base class of the :class:`~diloco.workloads.base.Workload` of one replica on text.

    ``data`` is that of the workload document.
    """

    def __init__(
        self, settings: GroupSettings, train: TrainingData, *, data: str, device: torch.device
    ) -> None:
        self._settings = settings
        self._train = train
        self._data = data
        self._device = device

    @property
    def sample_prompt(self) -> str:
        return first_words(self._data)

    def inner_optimizer(self, model: nn.Module) -> Optimizers:
        return inner_optimizers(model, self._settings)

    def attach(self, group: UnitGroup) -> None:
        if isinstance(self._train, UnitSamples):
            self._train.attach(group)

    def lr_at(self, step: int) -> float:
        return warmup_cosine(step, self._settings)

    def _to_device(self, windows: Tensor) -> Tensor:
        """Move windows of bytes or int32 to the device as int64, asynchronously on CUDA."""
        if self._device.type == "cuda":
            windows = windows.pin_memory().to(self._device, non_blocking=True)
        return windows.to(self._device, torch.int64)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()
