"""Which tensors are exchanged together: cutting a model into P fragments (arXiv:2501.18512).

Pure and deterministic: every replica computes the same cut from names and sizes, so nothing of it
travels. Tensors of one layer stay together where the pattern is about layers; a layer is what
stands under the first number in the names (``blocks.3.attention.weight`` is of ``blocks.3``), and a
tensor without one (an embedding, the last norm) is a layer of its own.

Patterns: *strided*, every P-th layer, so that each fragment has shallow and deep ones;
*sequential*, neighbouring layers; *size*, neighbouring tensors of about equal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diloco.protocol.blocks import Span


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a tensor lies in the flat vector. ``embedding``: of an ``nn.Embedding``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    offset: int = 0
    embedding: bool = False

    @property
    def stop(self) -> int:
        return self.offset + self.numel


class Table:
    """The flat vector's order: fragment after fragment, in the model's own order inside one.

    ``order[i]`` is the index of slot i in the model's own order.
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
        self._slices: list[slice] = []  # of self.slots, by fragment
        for fragment in range(fragments):
            start = self._slices[-1].stop if self._slices else 0
            self._slices.append(slice(start, start + fragment_of.count(fragment)))

    @property
    def fragments(self) -> int:
        return len(self._slices)

    def where(self, fragment: int | None) -> slice:
        """Of the slots of a fragment, or all."""
        return slice(None) if fragment is None else self._slices[fragment]

    def slots_of(self, fragment: int | None) -> tuple[Slot, ...]:
        """The slots of a fragment, or all; their offsets are those in the whole vector."""
        return self.slots[self.where(fragment)]

    def span(self, fragment: int | None) -> Span:
        """Where a fragment lies in the flat vector."""
        slots = self.slots_of(fragment)
        return Span(slots[0].offset, slots[-1].stop)


def assign(
    names: Sequence[str], numels: Sequence[int], *, fragments: int, pattern: str
) -> list[int]:
    """The fragment of each tensor; every fragment gets at least one.

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
        layers = list(names)  # too few layers: every tensor counts as one
    order = {layer: index for index, layer in enumerate(dict.fromkeys(layers))}
    if pattern == "strided":
        return [order[layer] % fragments for layer in layers]
    assert pattern == "sequential", pattern
    return [order[layer] * fragments // len(order) for layer in layers]


def layer_of(name: str) -> str:
    """The name up to its first number, or the whole name."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return name


def _by_size(numels: Sequence[int], fragments: int) -> list[int]:
    """Neighbours, each fragment closed when it has its share of what is left."""
    assigned: list[int] = []
    fragment, taken, left = 0, 0, sum(numels)
    share = left / fragments
    for index, numel in enumerate(numels):
        last = fragment == fragments - 1
        must = len(numels) - index == fragments - 1 - fragment  # the rest need one tensor each
        # Closing before this tensor misses the share by less than closing after it.
        better = taken > 0 and abs(taken - share) <= abs(taken + numel - share)
        if index and not last and assigned[-1] == fragment and (better or must):
            left -= taken
            fragment, taken = fragment + 1, 0
            share = left / (fragments - fragment)
        assigned.append(fragment)
        taken += numel
    return assigned
