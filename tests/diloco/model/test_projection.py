"""Components along a vector, and the addition of a multiple of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diloco.model.projection import PIECE, add_scaled, coefficient
from diloco.protocol.blocks import Span

NUMEL = 2 * PIECE + 100


def vector(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def along(x: Tensor, y: Tensor, *spans: Span) -> float:
    return coefficient(x, y, spans or [Span(0, x.numel())], total=lambda held: held)


def test_the_coefficient_is_that_of_the_component() -> None:
    x, y = vector(1), vector(2)
    x += 0.25 * y
    expected = float(x.double() @ y.double() / (y.double() @ y.double()))
    assert along(x, y) == torch.tensor(expected).item()
    assert abs(float((x - along(x, y) * y) @ y)) < 1e-3 * float(x @ y)


def test_elements_outside_of_the_spans_do_not_count() -> None:
    x, y = vector(1), vector(1)
    x[PIECE - 5 : PIECE + 5] *= -1e6
    spans = [Span(0, PIECE - 5), Span(PIECE + 5, NUMEL)]
    assert along(x, y, *spans) == 1.0
    assert along(x, y) == 0.0


def test_other_ranks_add_their_sums() -> None:
    x, y = vector(1, 8), vector(2, 8)
    x += y
    sums = iter([7.0, 14.0])
    assert coefficient(x, y, [Span(0, 8)], total=lambda held: next(sums)) == 0.5


@pytest.mark.parametrize(
    "direction",
    [-vector(1, 40), torch.zeros(40), *(torch.full((40,), x) for x in (1e-42, math.inf, math.nan))],
    ids=["opposite", "zero", "tiny", "inf", "nan"],
)
def test_without_a_direction_there_is_no_component(direction: Tensor) -> None:
    assert along(vector(1, 40).abs() if direction[0] == 1e-42 else vector(1, 40), direction) == 0.0


def test_an_empty_vector_has_no_component() -> None:
    empty = torch.empty(0)
    assert along(empty, empty, Span(0, 0)) == 0.0
    add_scaled(empty, empty, 2.0)


def test_every_element_is_added() -> None:
    x, y = vector(1), vector(2)
    expected = x + y.mul(0.3)
    add_scaled(x, y, 0.3)
    assert torch.equal(x, expected)
