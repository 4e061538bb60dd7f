"""Template tags of the comparison: a measure with its unit, and its change from the baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import template

from dashboard.presentation import formats
from runs.queries.comparison import Cell, Difference, Measure

register = template.Library()

SHOW = {
    "loss": formats.loss,
    "count": formats.count,
    "duration": formats.duration,
    "percent": formats.percent,
    "size": formats.size,
    "money": formats.money,
}


MOST_SHARE = 10.0
"""A larger change is shown without its percentage, which has too many digits to be read."""


@register.simple_tag
def measure(of: Measure, value: float | None) -> str:
    return SHOW[of.unit](value)


@register.simple_tag
def change(of: Measure, cell: Cell) -> str:
    """``−0.120 (−4.1%)``, without a large percentage; for a percentage ``+3 points``."""
    if cell.change is None:
        return ""
    if not cell.change:
        return "same"
    sign = "+" if cell.change > 0 else "−"
    if of.unit == "percent":
        return f"{sign}{abs(cell.change) * 100:.1f} points"
    share = ""
    if cell.share is not None and abs(cell.share) < MOST_SHARE:
        share = f" ({sign}{formats.percent(abs(cell.share))})"
    return f"{sign}{SHOW[of.unit](abs(cell.change))}{share}"


@register.filter
def pairs(difference: Difference) -> Iterator[tuple[Any, bool]]:
    return zip(difference.values, difference.same, strict=True)
