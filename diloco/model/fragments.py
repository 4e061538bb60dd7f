"""Divides a model into P fragments, whose tensors are exchanged together (Streaming DiLoCo,
arXiv:2501.18512).

Pure and deterministic: every replica computes the same division from names and sizes, so it is
never stored. Patterns for layers keep the tensors of a layer together. A layer is the name up to
its first number (``blocks.3.attention.weight`` belongs to ``blocks.3``); a tensor without a number
(an embedding, the last norm) is a separate layer.

Patterns: *strided*, every P-th layer, so that each fragment has shallow and deep layers;
*sequential*, neighbouring layers; *size*, neighbouring tensors of about equal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco.protocol.blocks import Span


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Position of a tensor in the flat vector, in elements. ``embedding``: it belongs to an
    ``nn.Embedding``. ``buffer``: it is a buffer, which becomes the average of the replicas."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    offset: int = 0
    embedding: bool = False
    buffer: bool = False

    @property
    def stop(self) -> int:
        return self.offset + self.numel


class Table:
    """The order of tensors in the flat vector: by fragment, in the model's order within a fragment.

    ``order[i]`` is the index of slot i in the model's order.
    """

    def __init__(self, slots: Sequence[Slot], *, fragments: int, pattern: str) -> None:
        fragment_of = assign(
            [slot.name for slot in slots],
            [slot.numel for slot in slots],
            fragments=fragments,
            pattern=pattern,
        )
        self.order = sorted(range(len(slots)), key=lambda index: fragment_of[index])
        placed: list[Slot] = []
        for index in self.order:
            placed.append(replace(slots[index], offset=placed[-1].stop if placed else 0))
        self.slots = tuple(placed)
        self.numel = placed[-1].stop
        self._slices: list[slice] = []  # into self.slots, by fragment
        for fragment in range(fragments):
            start = self._slices[-1].stop if self._slices else 0
            self._slices.append(slice(start, start + fragment_of.count(fragment)))

    @property
    def fragments(self) -> int:
        return len(self._slices)

    def where(self, fragment: int | None) -> slice:
        """Return the slice of ``slots`` of a fragment, or of all."""
        return slice(None) if fragment is None else self._slices[fragment]

    def slots_of(self, fragment: int | None) -> tuple[Slot, ...]:
        """Return the slots of a fragment, or all; their offsets are relative to the whole
        vector."""
        return self.slots[self.where(fragment)]

    def span(self, fragment: int | None) -> Span:
        """Return the elements of a fragment in the flat vector."""
        slots = self.slots_of(fragment)
        return Span(slots[0].offset, slots[-1].stop)


def assign(
    names: Sequence[str], numels: Sequence[int], *, fragments: int, pattern: str
) -> list[int]:
    """Return the fragment of each tensor; every fragment gets at least one.

    Raises :class:`ValueError` for more fragments than tensors.
    """
    if fragments > len(names):
        raise ValueError(
            f"expected at most as many fragments as the model has tensors, {len(names)}, "
            f"found {fragments}"
        )
    if pattern == "size":
        return _by_size(numels, fragments)
    layers = [layer_of(name) for name in names]
    if len(set(layers)) < fragments:
        layers = list(names)  # too few layers: use single tensors
    order = {layer: index for index, layer in enumerate(dict.fromkeys(layers))}
    if pattern == "strided":
        return [order[layer] % fragments for layer in layers]
    assert pattern == "sequential", pattern
    return [order[layer] * fragments // len(order) for layer in layers]


def layer_of(name: str) -> str:
    """Return the name up to its first number, or the whole name."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return name


def _by_size(numels: Sequence[int], fragments: int) -> list[int]:
    """Assign neighbours; a fragment is closed when it has its share of the remaining elements."""
    assigned: list[int] = []
    fragment, taken, left = 0, 0, sum(numels)
    share = left / fragments
    for index, numel in enumerate(numels):
        last = fragment == fragments - 1
        must = (
            len(numels) - index == fragments - 1 - fragment
        )  # the remaining fragments need one tensor each
        # Closing before this tensor misses the share by less than closing after it.
        better = taken > 0 and abs(taken - share) <= abs(taken + numel - share)
        if index and not last and assigned[-1] == fragment and (better or must):
            left -= taken
            fragment, taken = fragment + 1, 0
            share = left / (fragments - fragment)
        assigned.append(fragment)
        taken += numel
    return assigned
