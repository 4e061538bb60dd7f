"""The trained parameters of a model as one flat fp32 vector.

The exchange, the outer step and checkpoints work on this vector; the model is read and written
through it alone. The tensors of a fragment lie side by side in it, so that a fragment is a slice.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from diloco.model import named_parameters
from diloco.model.fragments import Slot, Table
from diloco.protocol.blocks import Span
from diloco.protocol.group_document import canonical_json

CHUNK = 2**22
"""Elements of a parameter that are read at a time where a whole fragment would be too much."""


class Layout:
    """The trained parameters of a model as one flat fp32 vector, fragment after fragment and in
    the model's own order inside one (:class:`~diloco.model.fragments.Table`).

    Frozen parameters and buffers are not part of it; a tied parameter appears once. Where FSDP2 has
    cut the parameters over several ranks, the vector is still the whole: :meth:`read` is then a
    collective of all those ranks, and :meth:`write` takes the whole vector on each.
    """

    def __init__(self, model: nn.Module, *, fragments: int = 1, pattern: str = "strided") -> None:
        embeddings = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
            for parameter in module.parameters(recurse=False)
        }
        trained = named_parameters.trained(model)
        slots = [
            Slot(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                numel=parameter.numel(),
                embedding=id(parameter) in embeddings,
            )
            for name, parameter in trained
        ]
        self.model_hash = _fingerprint(slots)
        self.tensors = tuple(slots)
        """In the model's own order."""
        self.table = Table(slots, fragments=fragments, pattern=pattern)
        self._parameters = [trained[index][1] for index in self.table.order]
        self._sharding = named_parameters.sharding_modules(model)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.table.slots

    @property
    def numel(self) -> int:
        return self.table.numel

    def span(self, fragment: int | None) -> Span:
        """Where a fragment lies in the flat vector."""
        return self.table.span(fragment)

    def _held(self, fragment: int | None) -> list[tuple[Slot, nn.Parameter]]:
        for module in self._sharding:
            module.reshard()  # whole parameters left by a forward pass would hide what is written
        where = self.table.where(fragment)
        return list(zip(self.slots[where], self._parameters[where], strict=True))

    @torch.no_grad()
    def read(self, fragment: int | None = None) -> Tensor:
        """The parameters of a fragment, or all, as a new fp32 vector (n,) on the CPU.

        It is pinned where the model is on a GPU, so that the copies run at full speed.
        """
        held = self._held(fragment)
        on_gpu = held[0][1].is_cuda
        first, last = held[0][0], held[-1][0]
        vector = torch.empty(last.stop - first.offset, dtype=torch.float32, pin_memory=on_gpu)
        for slot, parameter in held:
            piece = vector[slot.offset - first.offset : slot.stop - first.offset]
            piece.copy_(named_parameters.read(parameter).reshape(-1), non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        return vector

    @torch.no_grad()
    def write(self, vector: Tensor, fragment: int | None = None) -> None:
        """Set the parameters of a fragment, or all, in place, from a flat fp32 CPU vector (n,)."""
        held = self._held(fragment)
        first = held[0][0].offset
        for slot, parameter in held:
            piece = vector[slot.offset - first : slot.stop - first]
            named_parameters.write(parameter, piece.view(slot.shape))

    @torch.no_grad()
    def progress(self, base: Tensor, fragment: int | None = None) -> Tensor:
        """``local - base`` of a fragment, or all: a new fp32 vector (n,) on the CPU.

        ``base`` (n,) is what was written into the model; a parameter of lower precision holds it
        rounded, and that rounding is no progress.
        """
        local = self.read(fragment)
        slots = self.table.slots_of(fragment)
        first = slots[0].offset
        for slot in slots:
            where = slice(slot.offset - first, slot.stop - first)
            local[where].sub_(_held_in(slot, base[where]))
        return local

    @torch.no_grad()
    def put_progress(
        self, into: Tensor, base: Tensor, fragment: int | None = None, *, add: bool
    ) -> None:
        """As :meth:`progress`, but written ``into`` (n,) fp32 on the CPU, or added to it, a few
        megabytes at a time: nothing of the fragment's size is made."""
        held = self._held(fragment)
        first = held[0][0].offset
        scratch = torch.empty(
            min(CHUNK, into.numel()), dtype=torch.float32, pin_memory=held[0][1].is_cuda
        )
        for slot, parameter in held:
            whole = named_parameters.read(parameter).reshape(-1)
            for start in range(0, slot.numel, CHUNK):
                local = whole[start : start + CHUNK]
                piece = scratch[: local.numel()].copy_(local)
                offset = slot.offset - first + start
                where = slice(offset, offset + local.numel())
                piece.sub_(_held_in(slot, base[where]))
                if add:
                    into[where].add_(piece)
                else:
                    into[where].copy_(piece)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Name -> fp32 view of shape ``slot.shape`` into ``vector``."""
        return {slot.name: vector[slot.offset : slot.stop].view(slot.shape) for slot in self.slots}

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


def _held_in(slot: Slot, values: Tensor) -> Tensor:
    """fp32 ``values`` as a parameter of the slot's dtype holds them, in fp32."""
    if slot.dtype in ("bfloat16", "float16"):
        return values.to(getattr(torch, slot.dtype)).float()
    return values


def _fingerprint(slots: list[Slot]) -> str:
    """Of names, shapes and dtypes in the model's own order: replicas must agree on it."""
    table = [[slot.name, list(slot.shape), slot.dtype] for slot in slots]
    return hashlib.sha256(canonical_json(table)).hexdigest()
