"""A scatter plot as numbers for an SVG: the metric of each run by the value of a swept field."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dashboard.presentation.changes import value_text

WIDTH, HEIGHT = 300, 150
LEFT, RIGHT, TOP, BOTTOM = 12, 12, 12, 24
LOG_FROM = 20
"""Ratio of the largest to the smallest value from which the axis is logarithmic."""
TICK_GAP = 48
"""Smallest distance of the texts below the axis."""


@dataclass(frozen=True, kw_only=True)
class Dot:
    x: float
    y: float
    rank: int
    label: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    x: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """``dots`` are in pixels of a :data:`WIDTH` by :data:`HEIGHT` image, the highest value on
    top."""

    label: str
    dots: list[Dot]
    ticks: list[Tick]
    low: float
    high: float


def scatter(label: str, field: str, runs: Sequence[dict[str, Any]]) -> Scatter | None:
    """The plot of one field; None with fewer than two runs that have a value of the metric."""
    shown = [row for row in runs if row["value"] is not None and field in row["values"]]
    if len(shown) < 2:
        return None
    values = [row["values"][field] for row in shown]
    place = _axis(values)
    results = [row["value"] for row in shown]
    low, high = min(results), max(results)
    span = (high - low) or 1.0
    inner = HEIGHT - TOP - BOTTOM
    dots = [
        Dot(
            x=round(place(row["values"][field]), 1),
            y=round(TOP + inner * (high - row["value"]) / span, 1),
            rank=row["rank"] or 0,
            label=f"{row['run']['name']}: {row['value']:.6g}",
        )
        for row in shown
    ]
    return Scatter(label=label, dots=dots, ticks=_ticks(values, place), low=low, high=high)


def _ticks(values: Sequence[Any], place: Callable[[Any], float]) -> list[Tick]:
    """The first value, the last, and those between that have room."""
    texts = {place(value): _short(value) for value in values}
    first, *others = sorted(texts)
    chosen = [first]
    for x in others:
        has_room = x - chosen[-1] >= TICK_GAP
        if has_room and (x == others[-1] or others[-1] - x >= TICK_GAP):
            chosen.append(x)
    return [Tick(x=round(x, 1), text=texts[x]) for x in chosen]


def _short(value: Any) -> str:
    is_fraction = isinstance(value, float) and not value.is_integer()
    return f"{value:.2g}" if is_fraction else value_text(value)[:8]


def _axis(values: Sequence[Any]) -> Callable[[Any], float]:
    """Position of a value: by size for numbers, by order for others."""
    inner = WIDTH - LEFT - RIGHT
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        low, high = min(values), max(values)
        if low > 0 and high / low >= LOG_FROM:
            spread = math.log(high / low)
            return lambda value: LEFT + inner * math.log(value / low) / spread
        return lambda value: LEFT + inner * ((value - low) / (high - low) if high > low else 0.5)
    names = list(dict.fromkeys(map(str, values)))
    return lambda value: LEFT + inner * (names.index(str(value)) + 0.5) / len(names)
