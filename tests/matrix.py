"""Parameters of which ``make test`` runs a few.

A matrix is one check over all values: every page, operation, crash point, codec or kind of bucket.
Tests of the values that are not ``fast`` have the marker ``slow``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

Fast = int | Collection[Any]
"""The fast values, or how many of the first ones."""


def matrix(
    names: str | tuple[str, ...], values: Iterable[Any], *, fast: Fast, ids: Any = None
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` of a matrix."""
    parameters = slow_except(fast, values, rows=isinstance(names, tuple))
    return pytest.mark.parametrize(names, parameters, ids=ids)


def slow_except(fast: Fast, values: Iterable[Any], *, rows: bool = False) -> list[Any]:
    """The parameters ``values``, all slow except the ``fast`` ones. With ``rows`` each of them is a
    tuple of several parameters."""
    every = list(values)
    chosen = every[:fast] if isinstance(fast, int) else list(fast)
    missing = [value for value in chosen if value not in every]
    assert chosen and not missing, f"expected values of the matrix, found {missing}"
    return [
        value
        if value in chosen
        else pytest.param(*(value if rows else (value,)), marks=pytest.mark.slow)
        for value in every
    ]
