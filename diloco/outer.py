"""The outer side of DiLoCo: global weights, pseudo-gradients and the outer step.

Sign: the pseudo-gradient is ``base - local`` (arXiv:2311.08105, algorithm 1, line 12), so the outer
optimizer *descends* along it.

Everything here runs on the CPU in fp32 by separate multiplies and adds in a fixed order, so that
every replica computes the same bits (invariant I3): no ``torch.optim``, ``alpha=``, ``lerp`` or
``addcmul``, whose fused multiply-adds differ between machines, and no ``sum``, whose order changes
with the number of threads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diloco.rendezvous.settings import canonical_json


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


class OuterOptimizer:
    """SGD with Nesterov momentum on flat fp32 CPU vectors.

    With g the averaged pseudo-gradient: ``m = mu*m + g``; ``w = w - lr*(mu*m + g)``. Equal to
    ``torch.optim.SGD(nesterov=True)`` in exact arithmetic.
    """

    def __init__(self, *, lr: float, momentum: float, numel: int) -> None:
        self.lr = lr
        self.momentum = momentum
        self.buffer = torch.zeros(numel, dtype=torch.float32)

    @torch.no_grad()
    def step(self, weights: Tensor, gradient: Tensor) -> float:
        """Update ``weights`` (numel,) in place; returns the L2 norm of the change."""
        self.buffer.mul_(self.momentum)
        self.buffer.add_(gradient)
        update = self.buffer.mul(self.momentum)
        update.add_(gradient)
        update.mul_(self.lr)
        weights.sub_(update)
        return l2_norm(update)


@torch.no_grad()
def merge(vectors: Iterable[tuple[float, Tensor]], *, numel: int) -> Tensor:
    """Weighted sum of fp32 vectors in the order given: ``0 + w1*x1 + w2*x2 + ...``.

    Weights are expected to sum to one. One vector is held at a time beside the result.
    """
    total = torch.zeros(numel, dtype=torch.float32)
    for weight, vector in vectors:
        total.add_(vector.mul(weight))
    return total


@torch.no_grad()
def l2_norm(vector: Tensor, *, chunk: int = 2**20) -> float:
    """L2 norm by fp64 sums over a fixed binary tree: the same bits on any CPU, any thread count."""
    total = 0.0
    for start in range(0, vector.numel(), chunk):
        squares = vector[start : start + chunk].double()
        squares = squares.mul(squares)
        while squares.numel() > 1:
            if squares.numel() % 2:
                squares = torch.cat([squares, squares.new_zeros(1)])
            squares = squares[0::2].add(squares[1::2])
        total += float(squares[0])
    return math.sqrt(total) if math.isfinite(total) else float("nan")


def digest(vector: Tensor) -> str:
    """sha256 of a flat fp32 CPU vector's bytes."""
    return hashlib.sha256(vector.contiguous().numpy().data.cast("B")).hexdigest()
