"""The plot of a metric by a swept value."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from dashboard.presentation.scatter import HEIGHT, LEFT, RIGHT, TICK_GAP, WIDTH, scatter


def rows(*pairs: tuple[Any, float | None]) -> list[dict[str, Any]]:
    return [
        {"rank": place, "value": y, "values": {"f": x}, "run": {"name": f"r{place}"}}
        for place, (x, y) in enumerate(pairs, start=1)
    ]


def xs(*values: Any) -> list[float]:
    plot = scatter("F", "f", rows(*((value, float(i)) for i, value in enumerate(values))))
    assert plot is not None
    return [dot.x for dot in plot.dots]


def test_numbers_are_placed_by_size_and_wide_ranges_by_their_logarithm() -> None:
    middle = (LEFT + WIDTH - RIGHT) / 2
    assert xs(1, 2, 3) == [LEFT, middle, WIDTH - RIGHT]
    assert xs(1e-4, 1e-3, 1e-2) == [LEFT, middle, WIDTH - RIGHT]
    assert xs(0, 50, 100) == [LEFT, middle, WIDTH - RIGHT]
    assert xs("a", "b") == [LEFT + 69, LEFT + 207]
    assert xs(5, 5) == [middle, middle]


def test_the_highest_value_is_on_top_and_runs_without_one_are_left_out() -> None:
    plot = scatter("F", "f", rows((1, 3.0), (2, None), (3, 2.0)))
    assert plot is not None
    assert [dot.y < HEIGHT / 2 for dot in plot.dots] == [True, False]
    assert (plot.low, plot.high) == (2.0, 3.0)
    assert scatter("F", "f", rows((1, 3.0), (2, None))) is None
    assert scatter("F", "g", rows((1, 3.0), (2, 2.0))) is None


def ticks(*values: Any) -> list[str]:
    plot = scatter("F", "f", rows(*((value, 1.0) for value in values)))
    assert plot is not None
    places = [tick.x for tick in plot.ticks]
    assert all(b - a >= TICK_GAP for a, b in pairwise(places))
    return [tick.text for tick in plot.ticks]


def test_values_below_the_axis_have_room() -> None:
    written = ticks(*range(100))
    assert (written[0], written[-1]) == ("0", "99") and len(written) <= 6
    assert ticks(*(1e-4 * 1.15**i for i in range(36)))[0] == "0.0001"
    assert ticks(1, 1.01, 1.02, 3) == ["1", "3"]
    assert ticks("fp32", "int8") == ["fp32", "int8"]
    assert ticks(5, 5) == ["5"]
