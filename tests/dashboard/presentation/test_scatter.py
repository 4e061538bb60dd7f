"""The plot of a metric by a swept value."""

from __future__ import annotations

from typing import Any

from dashboard.presentation.scatter import HEIGHT, LEFT, RIGHT, WIDTH, scatter


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


def test_at_most_six_values_are_written() -> None:
    plot = scatter("F", "f", rows(*((x, 1.0) for x in range(100))))
    assert plot is not None
    assert len(plot.ticks) <= 6
