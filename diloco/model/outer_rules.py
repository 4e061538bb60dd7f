"""Outer rules: how the averaged pseudo-gradient changes the global weights.

A package adds a rule without a change of this library: an entry point of the group
``diloco.outer_rules``, whose name can then be entered as the setting ``outer_rule``. It names a
function that takes the :class:`~diloco.protocol.settings.GroupSettings` and returns an
:class:`OuterRule`.

Every replica applies every round itself and must get the same bits as all others, on any CPU, with
any number of threads, for a whole fragment or for a part of it. So a rule

- computes each element from the same element of its arguments: no sums, norms or sorting;
- uses separate operations that IEEE 754 rounds exactly (``add``, ``sub``, ``mul``, ``div``,
  ``sqrt``, ``sign``, comparisons). Not ``lerp``, ``addcmul``, ``addcdiv``, ``alpha=`` or
  ``torch.optim``, whose fused multiply-adds differ between machines, and not ``exp``, ``log`` or
  ``pow``;
- has no state besides its vectors, which checkpoints hold, and no randomness.

:func:`load_rule` refuses a rule that gives other bits in pieces. It cannot detect an operation that
differs between machines; the group detects this when the digests of its replicas differ. All
replicas must have the same version of the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Protocol

import torch
from torch import Tensor

from diloco.protocol.outer_rule_names import ENTRY_POINTS, NESTEROV
from diloco.protocol.settings import GroupSettings, SettingsError

COMMITTED_TOTAL = "committed_total"
"""Name of the count of committed rounds beside the vectors in a checkpoint."""
_TRIED, _CUT, _STEPS = 4099, 1021, 3
"""Elements, first piece and number of the updates that :func:`load_rule` compares."""


class OuterRule(Protocol):
    """An outer optimizer on flat fp32 CPU vectors."""

    @property
    def vectors(self) -> Sequence[str]:
        """Names of its state vectors, one element per weight. They start as zeros and are tensors
        of each checkpoint."""
        ...

    def update(self, gradient: Tensor, vectors: Mapping[str, Tensor], *, lr: float) -> Tensor:
        """Return a new tensor (n,) fp32, which is subtracted from the weights.

        ``gradient`` (n,) fp32 is the averaged pseudo-gradient ``base - local`` of some elements,
        which must not be changed. ``vectors`` are the same elements of the state, to change in
        place. ``lr`` is the outer learning rate of the round.
        """
        ...


class Nesterov:
    """SGD with Nesterov momentum, the outer optimizer of DiLoCo (arXiv:2311.08105).

    With g the averaged pseudo-gradient: ``m = mu*m + g``; the update is ``lr*(mu*m + g)``. Equal to
    ``torch.optim.SGD(nesterov=True)`` in exact arithmetic.
    """

    vectors = ("momentum",)

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum

    def update(self, gradient: Tensor, vectors: Mapping[str, Tensor], *, lr: float) -> Tensor:
        buffer = vectors["momentum"]
        buffer.mul_(self.momentum)
        buffer.add_(gradient)
        update = buffer.mul(self.momentum)
        update.add_(gradient)
        return update.mul_(lr)


def load_rule(settings: GroupSettings) -> OuterRule:
    """Return the rule that the settings name.

    Raises :class:`~diloco.protocol.settings.SettingsError` for a rule that is not installed, cannot
    be loaded or does not give the same bits in pieces.
    """
    name = settings.outer_rule
    if name == NESTEROV:
        return Nesterov(settings.outer_momentum)
    entry_points = [*metadata.entry_points(group=ENTRY_POINTS, name=name)]
    if len(entry_points) != 1:
        packages = ", ".join(str(entry_point.value) for entry_point in entry_points) or "none"
        raise _wrong(f"one installed rule {name!r}", packages)
    try:
        rule: OuterRule = entry_points[0].load()(settings)
    except Exception as error:
        error.add_note(f"in {entry_points[0].value}, the outer rule {name!r}")
        raise
    _check(name, rule)
    return rule


def _check(name: str, rule: OuterRule) -> None:
    names = tuple(getattr(rule, "vectors", ()))
    named = all(isinstance(vector, str) and vector for vector in names)
    if not named or COMMITTED_TOTAL in names or len(set(names)) < len(names):
        raise _wrong(f"rule {name!r} to have state vectors with different names", f"{names}")
    whole, pieces = _tried(rule, (_TRIED,)), _tried(rule, (_CUT, _TRIED - _CUT))
    for expected, found in zip(whole, pieces, strict=True):
        if not torch.equal(expected.view(torch.int32), found.view(torch.int32)):
            raise _wrong(
                f"rule {name!r} to give the same bits for a vector and for its pieces",
                "others: each element must be computed from the same element of its arguments",
            )


def _tried(rule: OuterRule, lengths: Sequence[int]) -> list[Tensor]:
    """Return the updates and the final state of a few steps, made in pieces of these lengths."""
    vectors = {name: torch.zeros(_TRIED) for name in rule.vectors}
    updates = []
    for step in range(_STEPS):
        mixed = torch.arange(_TRIED).mul_(7919).remainder_(1009)
        gradient = mixed.float().sub_(500.0 + 10.0 * step).div_(3.0)
        parts = []
        for index, length in enumerate(lengths):
            where = slice(sum(lengths[:index]), sum(lengths[:index]) + length)
            state = {name: vector[where] for name, vector in vectors.items()}
            before = gradient[where].clone()
            part = rule.update(gradient[where], state, lr=0.7)
            if part.shape != before.shape or part.dtype != torch.float32:
                raise _wrong(
                    f"an update ({length},) of float32", f"{tuple(part.shape)} {part.dtype}"
                )
            if not torch.equal(before, gradient[where]):
                raise _wrong("an update that leaves the gradient unchanged", "a changed gradient")
            parts.append(part)
        updates.append(torch.cat(parts))
    return [*updates, *vectors.values()]


def _wrong(expected: str, found: str) -> SettingsError:
    return SettingsError("outer_rule", f"expected {expected}, found {found}")
