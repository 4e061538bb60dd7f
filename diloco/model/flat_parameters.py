"""The trained parameters of a model, and buffers if replicas average them, as one flat fp32 vector.

The exchange, the outer step and checkpoints use this vector only. The tensors of a fragment are
adjacent in it, so that a fragment is a slice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from diloco.model import named_parameters
from diloco.model.buffers import exchangeable
from diloco.model.fragments import Slot, Table
from diloco.model.frozen import frozen_parameters
from diloco.model.host_copies import Piece, chunks_on_host
from diloco.model.outer_optimizer import digest
from diloco.protocol.blocks import Span
from diloco.protocol.group_document import canonical_json
from diloco.protocol.records import MAX_TENSORS, FrozenEntry


class Layout:
    """The trained parameters of a model as one flat fp32 vector, ordered by fragment and by model
    order within a fragment (:class:`~diloco.model.fragments.Table`).

    Frozen parameters are not included, and only compared (``frozen``); a tied parameter appears
    once. With ``buffers``, those that
    replicas average (:mod:`diloco.model.buffers`) are included after the parameters. With FSDP2 the
    vector still contains the full parameters: :meth:`read` is a collective operation of all ranks
    of the mesh, and :meth:`write` takes the full vector on each rank.

    A process *holds* the global state of all elements, or in a replica of several ranks that of a
    slice of each fragment (:class:`~diloco.ranks.sliced_layout.SlicedLayout`). ``held`` names what
    depends on it: positions in the vector of held elements, and the reductions over all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fragments: int = 1,
        pattern: str = "strided",
        buffers: bool = False,
        compare_frozen: bool = True,
    ) -> None:
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
        averaged = exchangeable(model) if buffers else []
        slots += [_buffer_slot(name, buffer) for name, buffer in averaged]
        frozen = sum(not parameter.requires_grad for parameter in model.parameters())
        _check_number(trained=len(slots), frozen=frozen)
        self.model_hash = _fingerprint(slots)
        self.tensors = tuple(slots)
        """The tensors in the model's order."""
        self.compares_frozen = compare_frozen
        """Whether the values of the frozen parameters must be equal in all replicas."""
        self._model = model
        self.table = Table(slots, fragments=fragments, pattern=pattern)
        tensors: list[Tensor] = [tensor for _, tensor in (*trained, *averaged)]
        self._parameters = [tensors[index] for index in self.table.order]
        self._sharding = named_parameters.sharding_modules(model)

    @cached_property
    def frozen(self) -> tuple[FrozenEntry, ...]:
        """The frozen parameters, with the digests of values that are compared. The first use reads
        these values, for sharded ones in a collective operation of all ranks
        (:meth:`diloco.ranks.collective_ops.Ranks.compare`)."""
        return frozen_parameters(self._model, digests=self.compares_frozen)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.table.slots

    @property
    def numel(self) -> int:
        return self.table.numel

    @property
    def averaged(self) -> tuple[Span, ...]:
        """The elements of buffers, which the outer optimizer averages."""
        return tuple(Span(slot.offset, slot.stop) for slot in self.slots if slot.buffer)

    def span(self, fragment: int | None) -> Span:
        """Return the elements of a fragment in the flat vector."""
        return self.table.span(fragment)

    # -- the elements that this process holds ----------------------------------------------------

    @property
    def held_numel(self) -> int:
        return self.numel

    @property
    def held_averaged(self) -> tuple[Span, ...]:
        """The part of :attr:`averaged` that this process holds, in its own vector."""
        return self.averaged

    def held_span(self, fragment: int | None) -> Span:
        """Return the held elements of a fragment, or all, in the vector of held elements."""
        return self.span(fragment)

    def held_position(self, fragment: int) -> int:
        """Return the position in the flat vector of the first held element of a fragment."""
        return self.span(fragment).start

    def held_parts(self, span: Span) -> Iterator[tuple[Span, int]]:
        """Yield the held parts of the elements ``span`` of the flat vector, and the position of
        each in the vector of held elements."""
        yield span, span.start

    def digest(self, held: Tensor) -> str:
        """Return the digest of a fragment from its held elements."""
        return digest(held)

    def model_digest(self, held: Tensor) -> str:
        """Return the digest of the whole vector from the held elements."""
        return digest(held)

    def on_all_ranks(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on all ranks."""
        return flag

    def norm(self, held: float) -> float:
        """Return the norm of a vector from that of its held elements."""
        return held

    def total(self, held: float) -> float:
        """Return a sum over all elements from that over the held ones."""
        return held

    # -- the model -------------------------------------------------------------------------------

    def _held(self, fragment: int | None) -> list[tuple[Slot, Tensor]]:
        for module in self._sharding:
            module.reshard()  # a forward pass can leave full parameters, which would hide the write
        where = self.table.where(fragment)
        return list(zip(self.slots[where], self._parameters[where], strict=True))

    def _pieces(self, fragment: int | None) -> Iterator[Piece]:
        """Yield the held pieces of the parameters of a fragment, or of all. Reading a sharded
        parameter is a collective operation, so every rank reads all of them."""
        first = self.span(fragment).start
        for slot, parameter in self._held(fragment):
            values = named_parameters.read(parameter).reshape(-1)
            yield Piece(slot=slot, values=values, at=slot.offset - first)

    @torch.no_grad()
    def read(self, fragment: int | None = None) -> Tensor:
        """Return the parameters of a fragment, or all, as a new fp32 vector (n,) on the CPU."""
        vector = torch.empty(self.held_span(fragment).numel, dtype=torch.float32)
        pieces = self._pieces(fragment)
        for chunk in chunks_on_host(pieces, numel=vector.numel(), changes=False):
            vector[chunk.where].copy_(chunk.values)
        return vector

    @torch.no_grad()
    def write(self, vector: Tensor, fragment: int | None = None) -> None:
        """Set the parameters of a fragment, or all, in place from a flat CPU vector (n,)."""
        parameters = self._held(fragment)
        first = parameters[0][0].offset
        for slot, parameter in parameters:
            piece = vector[slot.offset - first : slot.stop - first]
            named_parameters.write(parameter, piece.view(slot.shape))

    @torch.no_grad()
    def progress(self, base: Tensor, fragment: int | None = None) -> Tensor:
        """Return ``local - base`` of a fragment, or all, as a new fp32 vector (n,) on the CPU.

        ``base`` (n,) are the values written to the model. A parameter of lower precision holds them
        rounded; this rounding does not count as progress.
        """
        into = torch.empty(self.held_span(fragment).numel, dtype=torch.float32)
        self.put_progress(into, base, fragment, add=False)
        return into

    @torch.no_grad()
    def put_progress(
        self, into: Tensor, base: Tensor, fragment: int | None = None, *, add: bool
    ) -> None:
        """Write :meth:`progress` to ``into`` (n,) fp32 on the CPU, or add it, a few megabytes at a
        time, without a temporary of the fragment's size."""
        for chunk in chunks_on_host(self._pieces(fragment), numel=into.numel()):
            change = chunk.values.sub_(_rounded(chunk.slot, base[chunk.where].float()))
            if add:
                into[chunk.where].add_(change)
            else:
                into[chunk.where].copy_(change)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the tensors that this rank holds at the end of the block, bit by bit, whatever
        the block has written to them. Needs a copy of them in host memory, but no communication."""
        copies = [t.to("cpu", copy=True) for t in self._held_here()]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, copy in zip(self._held_here(), copies, strict=True):
                    tensor.copy_(copy)

    def _held_here(self) -> list[Tensor]:
        return [named_parameters.local(parameter) for _, parameter in self._held(None)]

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of ``vector`` with shape ``slot.shape``, by name."""
        return {slot.name: vector[slot.offset : slot.stop].view(slot.shape) for slot in self.slots}

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the vector of the tensors; the inverse of :meth:`split`. Raises
        :class:`ValueError` for names or shapes other than the model's."""
        expected = {slot.name: slot.shape for slot in self.slots}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if expected != found:
            differences = sorted(set(expected.items()) ^ set(found.items()))[:3]
            raise ValueError(f"expected the model's own tensors, found others: {differences}")
        vector = torch.empty(self.numel, dtype=torch.float32)
        for name, view in self.split(vector).items():
            view.copy_(tensors[name])
        return vector


def _buffer_slot(name: str, buffer: Tensor) -> Slot:
    """Return the slot of a buffer. RDA averages embeddings, and therefore also buffers, as they
    are."""
    return Slot(
        name=name,
        shape=tuple(buffer.shape),
        dtype=str(buffer.dtype).removeprefix("torch."),
        numel=buffer.numel(),
        embedding=True,
        buffer=True,
    )


def _rounded(slot: Slot, values: Tensor) -> Tensor:
    """Return fp32 ``values`` rounded to the slot's dtype, in fp32."""
    if slot.dtype in ("bfloat16", "float16"):
        return values.to(getattr(torch, slot.dtype)).float()
    return values


def _check_number(*, trained: int, frozen: int) -> None:
    """Raise :class:`ValueError` for more tensors than a checkpoint's manifest can list."""
    if trained + frozen <= MAX_TENSORS:
        return
    raise ValueError(
        f"expected a model of at most {MAX_TENSORS:,} parameters, with averaged buffers, found "
        f"{trained + frozen:,} ({trained:,} trained, {frozen:,} frozen). Join small parameters to "
        "larger ones, e.g. those of all experts of a layer"
    )


def _fingerprint(slots: list[Slot]) -> str:
    """Return the hash of names, shapes and dtypes in the model's order, which must be equal in all
    replicas."""
    table = [[slot.name, list(slot.shape), slot.dtype] for slot in slots]
    return hashlib.sha256(canonical_json(table)).hexdigest()
