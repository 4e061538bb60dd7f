"""The trained parameters of a model as one flat fp32 vector.

The exchange, the outer step and checkpoints work on this vector; the model is read and written
through it alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diloco.rendezvous.document import canonical_json


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a parameter lies in the flat vector."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    numel: int


class Layout:
    """The trained parameters of a model as one flat fp32 vector, in the model's own order.

    Frozen parameters and buffers are not part of it; a tied parameter appears once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters: list[nn.Parameter] = []
        slots: list[Slot] = []
        offset = 0
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            slots.append(
                Slot(
                    name=name,
                    shape=tuple(parameter.shape),
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    offset=offset,
                    numel=parameter.numel(),
                )
            )
            self._parameters.append(parameter)
            offset += parameter.numel()
        if not slots:
            raise ValueError("expected a model with trainable parameters, found none")
        self.slots = tuple(slots)
        self.numel = offset
        self._buffer: Tensor | None = None

    @property
    def model_hash(self) -> str:
        """Fingerprint of names, shapes and dtypes: replicas must agree on it."""
        table = [[slot.name, list(slot.shape), slot.dtype] for slot in self.slots]
        return hashlib.sha256(canonical_json(table)).hexdigest()

    @torch.no_grad()
    def read(self) -> Tensor:
        """The parameters as (numel,) fp32 on the CPU, in a buffer that the next call overwrites.

        The buffer is pinned where the model is on a GPU, so that the copies run at full speed.
        """
        on_gpu = self._parameters[0].is_cuda
        if self._buffer is None:
            self._buffer = torch.empty(self.numel, dtype=torch.float32, pin_memory=on_gpu)
        for slot, parameter in zip(self.slots, self._parameters, strict=True):
            piece = self._buffer[slot.offset : slot.offset + slot.numel]
            piece.copy_(parameter.detach().reshape(-1), non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        return self._buffer

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set the parameters, in place, from a flat fp32 CPU vector (numel,)."""
        for slot, parameter in zip(self.slots, self._parameters, strict=True):
            piece = vector[slot.offset : slot.offset + slot.numel]
            parameter.copy_(piece.view(slot.shape))

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Name -> fp32 view of shape ``slot.shape`` into ``vector``."""
        return {
            slot.name: vector[slot.offset : slot.offset + slot.numel].view(slot.shape)
            for slot in self.slots
        }

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        """The inverse of :meth:`split`. Raises :class:`ValueError` on another set of tensors."""
        expected = {slot.name: slot.shape for slot in self.slots}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if expected != found:
            odd = sorted(set(expected.items()) ^ set(found.items()))[:3]
            raise ValueError(f"expected the model's own tensors, found others: {odd}")
        vector = torch.empty(self.numel, dtype=torch.float32)
        for name, view in self.split(vector).items():
            view.copy_(tensors[name])
        return vector
