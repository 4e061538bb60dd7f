"""A bar chart of days, stacked by group, as numbers for an SVG that needs no script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from dashboard.presentation import formats

LEAST_USD = 1e-9
"""Without a day of that amount there is no chart. The smallest floats cannot be divided."""
COLOURS = 8
"""Colours of groups; others share the last one."""
HEIGHT = 100.0
SLOT = 10.0
BAR = 8.0
TICKS = 4
"""Most labels of the axis above 0."""
LABELS = 7


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A part of the bar of a day. The numbers are attributes of an SVG ``rect``."""

    x: str
    y: str
    width: str
    height: str
    colour: int
    label: str
    value: float


@dataclass(frozen=True, kw_only=True)
class DayChart:
    """``ticks`` are the labels of the axis from top to 0, at equal distances. ``labels`` are those
    of the days, '' for days without one; narrow screens leave out the ``alternate`` ones."""

    bars: list[Bar]
    legend: list[dict[str, Any]]
    ticks: list[dict[str, str]]
    width: float
    labels: list[dict[str, Any]]


def day_chart(
    days: Sequence[Mapping[str, Any]], names: Sequence[str], labels: Mapping[str, str]
) -> DayChart | None:
    """The chart of rows with ``day`` and ``backends``; None if no day has cost something.

    ``names`` are the groups in their order, which decides their colours.
    """
    sums = [sum(day["backends"].values()) for day in days]
    largest = max(sums, default=0.0)
    if not LEAST_USD <= largest < math.inf:
        return None
    ticks = axis(largest)
    scale = HEIGHT / ticks[0]
    colours = {name: min(place, COLOURS - 1) for place, name in enumerate(names)}
    bars = []
    for place, day in enumerate(days):
        top = HEIGHT
        for name in sorted(day["backends"], key=lambda name: colours.get(name, COLOURS)):
            height = day["backends"][name] * scale
            top -= height
            bars.append(
                Bar(
                    x=f"{place * SLOT + (SLOT - BAR) / 2:.1f}",
                    y=f"{top:.3f}",
                    width=f"{BAR:.1f}",
                    height=f"{height:.3f}",
                    colour=colours.get(name, COLOURS - 1),
                    label=f"{day['day']}, {labels.get(name, name)}",
                    value=day["backends"][name],
                )
            )
    shown = [name for name in names if any(name in day["backends"] for day in days)]
    every = math.ceil(len(days) / LABELS)
    return DayChart(
        bars=bars,
        legend=[{"name": labels.get(name, name), "colour": colours[name]} for name in shown],
        ticks=[{"label": _dollars(tick), "y": f"{HEIGHT - tick * scale:.3f}"} for tick in ticks],
        width=len(days) * SLOT,
        labels=[
            {
                "text": "" if place % every else _day(str(day["day"])),
                "alternate": place % (2 * every) != 0,
            }
            for place, day in enumerate(days)
        ],
    )


def _day(text: str) -> str:
    """``Nov 17``."""
    day = date.fromisoformat(text)
    return f"{day:%b} {day.day}"


def _dollars(value: float) -> str:
    return formats.money(value) if value >= 1000 else f"${value:g}"


def axis(largest: float) -> list[float]:
    """Round values at equal distances, from one of at least ``largest`` down to 0."""
    step = 10.0 ** math.floor(math.log10(largest))
    for factor in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 2.5):
        count = math.ceil(largest / (step * factor) - 1e-9)
        if count <= TICKS:
            return [step * factor * n for n in range(max(count, 1), -1, -1)]
    return [largest, 0.0]
