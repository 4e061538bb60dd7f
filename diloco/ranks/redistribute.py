"""Moves elements of a vector that is divided over the ranks, and scales its tensors to norms.

All ranks call a function here together. No request to the store happens inside one, so that no rank
waits for another one that has failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diloco.model.outer_optimizer import NORM_CHUNK, added, chunk_squares, root, scale
from diloco.protocol.blocks import Span
from diloco.ranks.command_channel import CommandChannel


def common(one: Span, other: Span) -> Span:
    """Return the elements of both spans; an empty span if there are none."""
    start = max(one.start, other.start)
    return Span(start, max(start, min(one.stop, other.stop)))


def redistribute(
    channel: CommandChannel, own: Tensor, held: Sequence[Span], wanted: Sequence[Span]
) -> Tensor:
    """Return the elements that this rank wants of a vector, of which each rank holds others.

    Args:
        own: (n,) on the CPU, the elements ``held`` of this rank.
        held: the elements of each rank, which do not overlap.
        wanted: the elements that each rank wants, all of which are held.
    """
    mine = wanted[channel.rank]
    received = torch.empty(mine.numel, dtype=own.dtype)
    for source, has in enumerate(held):
        for target, wants in enumerate(wanted):
            part = common(has, wants)
            if not part.numel or channel.rank not in (source, target):
                continue
            here = own[part.start - has.start : part.stop - has.start]
            into = received[part.start - mine.start : part.stop - mine.start]
            if source == target:
                into.copy_(here)
            elif channel.rank == source:
                channel.send(here.contiguous().view(torch.uint8), target)
            else:
                channel.receive(into.view(torch.uint8), source)
    return received


def rescale_slices(
    channel: CommandChannel,
    vector: Tensor,
    slices: Sequence[Span],
    tensors: Sequence[tuple[Span, float]],
) -> None:
    """Scale tensors to norms as :func:`~diloco.model.outer_optimizer.rescale` does, in place, with
    the same bits. ``vector`` (n,) fp32 has this rank's slice.

    The rank that holds the first element of a chunk of a norm adds its squares, and receives the
    elements of the chunk that the next rank holds.
    """
    own = slices[channel.rank]
    ends = [_end_of_chunks(held, tensors) for held in slices]
    tails = [Span(held.stop, end) for held, end in zip(slices, ends, strict=True)]
    tail = redistribute(channel, vector, slices, tails)
    parts = list(_first_chunks(own, tensors))
    squares = [_squares(vector, tail, own, span) for _, span in parts]
    texts = channel.gather(
        json.dumps([[index, sums] for (index, _), sums in zip(parts, squares, strict=True)])
    )
    sums: dict[int, list[float]] = {}
    for text in texts:
        for index, part in json.loads(text):
            sums.setdefault(index, []).extend(part)
    for index, (span, length) in enumerate(tensors):
        inside = common(span, own)
        piece = vector[inside.start - own.start : inside.stop - own.start]
        scale(piece, root(added(sums.get(index, []))), length)


def _first_chunks(held: Span, tensors: Sequence[tuple[Span, float]]) -> Iterator[tuple[int, Span]]:
    """Yield (index, elements) of the chunks of each tensor whose first element is held."""
    for index, (span, _) in enumerate(tensors):
        inside = common(span, held)
        start, stop = (_next_chunk(span, where) for where in (inside.start, inside.stop))
        if inside.numel and start < stop:
            yield index, Span(start, stop)


def _next_chunk(tensor: Span, where: int) -> int:
    """Return where the first chunk from an element of a tensor on begins, at most its end."""
    chunks = -(-(where - tensor.start) // NORM_CHUNK)
    return min(tensor.stop, tensor.start + chunks * NORM_CHUNK)


def _end_of_chunks(held: Span, tensors: Sequence[tuple[Span, float]]) -> int:
    return max([held.stop, *(span.stop for _, span in _first_chunks(held, tensors))])


def _squares(vector: Tensor, tail: Tensor, own: Span, span: Span) -> list[float]:
    """Return the sums of squares of chunks, the last of which can end in ``tail``."""
    start, stop = span.start - own.start, span.stop - own.start
    if stop <= vector.numel():
        return chunk_squares(vector[start:stop])
    last = start + (stop - start - 1) // NORM_CHUNK * NORM_CHUNK
    crossing = torch.cat([vector[last:], tail[: stop - vector.numel()]])
    return chunk_squares(vector[start:last]) + chunk_squares(crossing)
