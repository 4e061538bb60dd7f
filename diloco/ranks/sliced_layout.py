"""The layout of a replica of several ranks: each rank holds one slice of every fragment.

The global weights, the outer optimizer and all vectors of an exchange exist once, divided over the
ranks. All methods are collective: all ranks call them together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from diloco.model import named_parameters
from diloco.model.flat_parameters import Layout
from diloco.model.fragments import Slot
from diloco.model.host_copies import Piece
from diloco.model.outer_optimizer import DIGEST_CHUNK, ContentDigest, vector_digests
from diloco.protocol.blocks import Span, slice_count, slice_spans
from diloco.ranks.command_channel import LEADER, CommandChannel

BUCKET = 2**22
"""Elements of the flat vector that a write has in memory at a time; a larger tensor is one
bucket."""


DIGEST_NUMEL = DIGEST_CHUNK // torch.float32.itemsize
"""Elements of a chunk of the digest of a vector."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Elements of the flat vector that one rank holds, and the position of the first one in the
    vector of the elements that it holds."""

    rank: int
    span: Span
    at: int

    def within(self, span: Span) -> Iterator[Stretch]:
        """Yield the part of the stretch in ``span``, if there is one."""
        low, high = max(span.start, self.span.start), min(span.stop, self.span.stop)
        if low < high:
            at = self.at + low - self.span.start
            yield Stretch(rank=self.rank, span=Span(low, high), at=at)

    def of(self, held: Tensor) -> Tensor:
        """Return a view of the elements, on the rank that holds them."""
        return held[self.at : self.at + self.span.numel]


class SlicedLayout(Layout):
    """A layout of a model on all ranks of ``channel``."""

    def __init__(self, model: nn.Module, channel: CommandChannel, **cut: Any) -> None:
        named_parameters.check_placements(model)
        super().__init__(model, **cut)
        self._channel = channel
        fragments = range(self.table.fragments)
        self._slices = [_slices(self.span(fragment), channel.size) for fragment in fragments]
        sizes = [self._slices[fragment][channel.rank].numel for fragment in fragments]
        self._starts = [0, *accumulate(sizes)]

    @property
    def held_numel(self) -> int:
        return self._starts[-1]

    @property
    def held_averaged(self) -> tuple[Span, ...]:
        spans = []
        for averaged in self.averaged:
            for fragment, slices in enumerate(self._slices):
                own = slices[self._channel.rank]
                low, high = max(averaged.start, own.start), min(averaged.stop, own.stop)
                if low < high:
                    offset = self._starts[fragment] - own.start
                    spans.append(Span(low + offset, high + offset))
        return tuple(spans)

    def held_span(self, fragment: int | None) -> Span:
        if fragment is None:
            return Span(0, self.held_numel)
        return Span(self._starts[fragment], self._starts[fragment + 1])

    def is_divided(self, fragment: int) -> bool:
        """Return whether several ranks hold elements of a fragment."""
        return self._slices[fragment][0] != self.span(fragment)

    def slice_of(self, fragment: int) -> Span:
        """Return the elements of a fragment that this rank holds, relative to the fragment."""
        return self.slices_of(fragment)[self._channel.rank]

    def slices_of(self, fragment: int) -> list[Span]:
        """Return the elements of a fragment that each rank holds, relative to the fragment."""
        first = self.span(fragment).start
        return [Span(own.start - first, own.stop - first) for own in self._slices[fragment]]

    def held_position(self, fragment: int) -> int:
        return self._slices[fragment][self._channel.rank].start

    def held_parts(self, span: Span) -> Iterator[tuple[Span, int]]:
        for stretch in self.stretches:
            if stretch.rank == self._channel.rank:
                yield from ((part.span, part.at) for part in stretch.within(span))

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """All elements, in the order of the flat vector, by the ranks that hold them; slices of one
        rank in a row are one stretch."""
        found: list[Stretch] = []
        held = [0] * self._channel.size
        slices = [own for fragment in self._slices for own in enumerate(fragment)]
        for rank, own in slices:
            if found and found[-1].rank == rank:
                found[-1] = replace(found[-1], span=Span(found[-1].span.start, own.stop))
            elif own.numel:
                found.append(Stretch(rank=rank, span=own, at=held[rank]))
            held[rank] += own.numel
        return tuple(found)

    # -- reductions over all ranks ---------------------------------------------------------------

    def digest(self, held: Tensor) -> str:
        content = ContentDigest()
        for digests in self._channel.gather(vector_digests(held).hex()):
            content.update_chunks(bytes.fromhex(digests))
        return content.hexdigest()

    def model_digest(self, held: Tensor, channel: CommandChannel | None = None) -> str:
        """Return the digest of the whole vector; ``channel`` replaces the layout's own. The rank
        with the first element of a chunk receives the elements that others hold, and computes its
        digest."""
        channel = channel or self._channel
        own, ranks = [], []
        for start in range(0, self.numel, DIGEST_NUMEL):
            span = Span(start, min(self.numel, start + DIGEST_NUMEL))
            parts = [part for stretch in self.stretches for part in stretch.within(span)]
            ranks.append(parts[0].rank)
            chunk = _sent_to_first(parts, held, channel)
            if chunk is not None:
                own.append(vector_digests(chunk).hex())
        gathered = [iter(text.split()) for text in channel.gather(" ".join(own))]
        content = ContentDigest()
        for rank in ranks:
            content.update_chunks(bytes.fromhex(next(gathered[rank])))
        return content.hexdigest()

    def on_all_ranks(self, flag: bool) -> bool:
        return self._channel.total(0 if flag else 1) == 0

    def norm(self, held: float) -> float:
        return math.sqrt(self.total(held * held))

    def total(self, held: float) -> float:
        total: float = self._channel.total(held)
        return total

    def gather(self, held: Tensor, fragment: int | None = None) -> Tensor:
        """Return all elements of a fragment, or of the model, on the leader; nothing elsewhere."""
        is_leader = self._channel.is_leader
        whole = torch.empty(self.span(fragment).numel if is_leader else 0, dtype=held.dtype)
        for index in self._indices(fragment):
            own = self._held_part(held, index, fragment)
            if not is_leader:
                if own.numel():
                    self._channel.send(own.view(torch.uint8), LEADER)
                continue
            for rank, part in enumerate(self._parts(whole, index, fragment)):
                if rank == LEADER:
                    part.copy_(own)
                elif part.numel():
                    self._channel.receive(part.view(torch.uint8), rank)
        return whole

    def scatter(
        self,
        whole: Tensor,
        fragment: int | None = None,
        channel: CommandChannel | None = None,
    ) -> Tensor:
        """Return the elements of the leader's fp32 vector ``whole`` that this rank holds.
        ``channel`` replaces the layout's own."""
        channel = channel or self._channel
        held = torch.empty(self.held_span(fragment).numel)
        for index in self._indices(fragment):
            own = self._held_part(held, index, fragment)
            if not channel.is_leader:
                if own.numel():
                    channel.receive(own.view(torch.uint8), LEADER)
                continue
            for rank, part in enumerate(self._parts(whole, index, fragment)):
                if rank == LEADER:
                    own.copy_(part)
                elif part.numel():
                    channel.send(part.view(torch.uint8), rank)
        return held

    def _indices(self, fragment: int | None) -> Iterable[int]:
        return range(self.table.fragments) if fragment is None else [fragment]

    def _held_part(self, held: Tensor, index: int, fragment: int | None) -> Tensor:
        """Return fragment ``index`` of a vector of the held elements of ``fragment``."""
        span, first = self.held_span(index), self.held_span(fragment).start
        return held[span.start - first : span.stop - first]

    def _parts(self, whole: Tensor, index: int, fragment: int | None) -> list[Tensor]:
        """Return the slice of each rank of fragment ``index`` in a vector of all elements of
        ``fragment``."""
        first = self.span(fragment).start
        return [whole[span.start - first : span.stop - first] for span in self._slices[index]]

    # -- the model -------------------------------------------------------------------------------

    def _pieces(self, fragment: int | None) -> Iterator[Piece]:
        base = self.held_span(fragment).start
        for index in self._indices(fragment):
            own = self._slices[index][self._channel.rank]
            start = self._starts[index] - base
            for slot, parameter in self._held(index):
                values = self._values(slot, parameter)
                low, high = max(slot.offset, own.start), min(slot.stop, own.stop)
                if low < high:
                    inside = values[low - slot.offset : high - slot.offset]
                    yield Piece(slot=slot, values=inside, at=start + low - own.start)

    def _values(self, slot: Slot, parameter: Tensor) -> Tensor:
        """Return all elements of a tensor. A buffer can differ by rank: the leader's counts."""
        values = named_parameters.read(parameter).reshape(-1)
        if slot.buffer:
            values = values.to("cpu", torch.float32, copy=True)
            self._channel.broadcast(values)
        return values

    @torch.no_grad()
    def write(self, vector: Tensor, fragment: int | None = None) -> None:
        """Set the parameters of a fragment, or all, on all ranks from the elements that each
        holds. At most one bucket of the flat vector is in memory."""
        for index in self._indices(fragment):
            own = self._held_part(vector, index, fragment)
            for bucket in self._buckets(index):
                span = Span(bucket[0][0].offset, bucket[-1][0].stop)
                whole = self._gathered_everywhere(own, index, span)
                for slot, parameter in bucket:
                    held = whole[slot.offset - span.start : slot.stop - span.start]
                    named_parameters.write(parameter, held.view(slot.shape))

    def _gathered_everywhere(self, own: Tensor, index: int, span: Span) -> Tensor:
        """Return the elements ``span`` of the flat vector on every rank."""
        whole = torch.empty(span.numel, dtype=torch.float32)
        for rank, held in enumerate(self._slices[index]):
            low, high = max(span.start, held.start), min(span.stop, held.stop)
            if low < high:
                part = whole[low - span.start : high - span.start]
                if rank == self._channel.rank:
                    part.copy_(own[low - held.start : high - held.start])
                self._channel.broadcast(part, root=rank)
        return whole

    def _buckets(self, fragment: int) -> Iterator[list[tuple[Slot, Tensor]]]:
        bucket: list[tuple[Slot, Tensor]] = []
        size = 0
        for slot, parameter in self._held(fragment):
            if bucket and size + slot.numel > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append((slot, parameter))
            size += slot.numel
        yield bucket


def _sent_to_first(
    parts: Sequence[Stretch], held: Tensor, channel: CommandChannel
) -> Tensor | None:
    """Return the elements of adjacent parts on the rank of the first one, None on the others."""
    first = parts[0].rank
    if len(parts) == 1:
        return parts[0].of(held) if first == channel.rank else None
    pieces = []
    for part in parts:
        if part.rank == channel.rank:
            piece = part.of(held)
            if first != channel.rank:
                channel.send(piece.view(torch.uint8), first)
        elif first == channel.rank:
            piece = torch.empty(part.span.numel, dtype=held.dtype)
            channel.receive(piece.view(torch.uint8), part.rank)
        else:
            continue
        pieces.append(piece)
    return torch.cat(pieces) if first == channel.rank else None


def _slices(span: Span, ranks: int) -> list[Span]:
    """Return the elements of each rank in a fragment; those of the last ranks can be empty."""
    spans = slice_spans(span.numel, slice_count(span.numel, ranks))
    spans += [Span(span.numel, span.numel)] * (ranks - len(spans))
    return [Span(span.start + part.start, span.start + part.stop) for part in spans]
