"""The bar chart of days."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dashboard.presentation.day_chart import COLOURS, axis, day_chart


def days(*amounts: dict[str, float]) -> list[dict[str, Any]]:
    return [{"day": f"2026-11-{n:02}", "backends": a} for n, a in enumerate(amounts, start=1)]


def test_bars_are_stacked_from_the_bottom_in_the_order_of_the_names() -> None:
    chart = day_chart(days({"b": 10.0, "a": 30.0}, {}), ["a", "b"], {"a": "Alpha"})
    assert chart is not None
    first, second = chart.bars
    assert (first.label, second.label) == ("2026-11-01, Alpha", "2026-11-01, b")
    assert (first.colour, second.colour) == (0, 1)
    assert float(first.y) + float(first.height) == pytest.approx(100)
    assert float(second.y) + float(second.height) == pytest.approx(float(first.y))
    assert [tick["label"] for tick in chart.ticks] == ["$40", "$30", "$20", "$10", "$0"]
    assert float(second.y) == pytest.approx(0)
    assert [item["name"] for item in chart.legend] == ["Alpha", "b"]


def test_no_amount_has_no_chart() -> None:
    assert day_chart([], [], {}) is None
    assert day_chart(days({}, {"a": 0.0}), ["a"], {}) is None
    assert day_chart(days({"a": float("inf")}), ["a"], {}) is None
    assert day_chart(days({"a": 1e-323}), ["a"], {}) is None  # as by a price of 1e-320 an hour


@pytest.mark.parametrize("largest", [1e-9, 0.004, 0.3, 1, 7, 9.99, 10, 113.4, 99_999.0, 1e12])
def test_the_axis_reaches_the_largest_amount_in_few_steps(largest: float) -> None:
    ticks = axis(largest)
    assert ticks[-1] == 0
    assert largest <= ticks[0] * (1 + 1e-9) <= largest * 2.5
    assert 2 <= len(ticks) <= 5
    steps = [a - b for a, b in itertools.pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_only_some_days_of_a_long_period_have_a_label() -> None:
    amounts = [{"a": 1.0}] * 28
    chart = day_chart(days(*amounts), ["a"], {})
    assert chart is not None
    assert [label["text"] for label in chart.labels if label["text"]][:2] == ["Nov 1", "Nov 5"]
    shown = [label for label in chart.labels if label["text"] and not label["alternate"]]
    assert len(shown) == 4


def test_many_groups_share_the_last_colour() -> None:
    names = [f"b{n}" for n in range(12)]
    chart = day_chart(days(dict.fromkeys(names, 1.0)), names, {})
    assert chart is not None
    assert {bar.colour for bar in chart.bars} == set(range(COLOURS))
