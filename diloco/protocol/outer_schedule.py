"""The outer learning rate as a function of the round, with the same bits on every machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.protocol.settings import GroupSettings

TERMS = 12
"""Terms of the sine's series, which leave an error below 1e-19 up to pi / 2."""


def outer_lr_at(settings: GroupSettings, round: int) -> float:
    """Return the outer learning rate of the ``round``-th committed round, counted from 1.

    It rises linearly during ``outer_warmup_rounds``, then falls by ``outer_schedule`` to
    ``outer_min_lr_ratio`` of the peak in the last round. Void rounds do not count, so that the last
    round of a run always has the last rate.
    """
    peak, warmup = settings.outer_lr, settings.outer_warmup_rounds
    if round < warmup:
        return peak * (round / warmup)
    if settings.outer_schedule == "constant":
        return peak
    rest = max(1, settings.total_rounds - max(1, warmup))
    progress = min(1.0, max(0, round - max(1, warmup)) / rest)
    if settings.outer_schedule == "cosine":
        remaining = 0.5 * (1.0 - _sine(math.pi * (progress - 0.5)))
    else:
        remaining = 1.0 - progress
    lowest = settings.outer_min_lr_ratio
    return peak * (lowest + (1.0 - lowest) * remaining)


def _sine(angle: float) -> float:
    """Return the sine of an angle from -pi / 2 to pi / 2.

    Uses only operations that IEEE 754 rounds exactly: the last bit of ``math.sin`` and ``math.cos``
    depends on the C library, and all replicas must compute the same weights.
    """
    total = term = angle
    for k in range(1, TERMS):
        term *= -(angle * angle) / (2 * k * (2 * k + 1))
        total += term
    return total
