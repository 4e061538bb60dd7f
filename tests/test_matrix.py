"""Parameters of which ``make test`` runs a few."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import matrix, slow_except


def slow(parameters: list[Any]) -> list[Any]:
    """The values of the parameters with the marker ``slow``."""
    marked = [value for value in parameters if hasattr(value, "marks")]
    assert all([mark.name for mark in value.marks] == ["slow"] for value in marked)
    return [value.values for value in marked]


def test_all_values_but_the_fast_ones_are_slow() -> None:
    assert slow(slow_except(("b",), ["a", "b", "c"])) == [("a",), ("c",)]
    assert slow(slow_except(2, range(4))) == [(2,), (3,)]
    assert len(slow_except(2, range(4))) == 4


def test_a_tuple_is_one_value_or_a_row() -> None:
    rows = [("a", 1), ("b", 2)]
    assert slow(slow_except([("a", 1)], rows)) == [(("b", 2),)]
    assert slow(matrix(("name", "number"), rows, fast=1).args[1]) == [("b", 2)]
    assert slow(matrix("name", rows, fast=1).args[1]) == [(("b", 2),)]


@pytest.mark.parametrize("fast", [(), 0, ("d",), ("a", "d")])
def test_fast_values_are_values_of_the_matrix(fast: Any) -> None:
    with pytest.raises(AssertionError, match="expected values of the matrix"):
        slow_except(fast, ["a", "b", "c"])
