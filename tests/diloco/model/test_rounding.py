"""bf16 values of the outer state are rounded at random, with bits that depend on nothing but the
round and the position."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.model.outer_optimizer import OuterOptimizer, digest
from diloco.model.rounding import PERIOD, RandomRounding
from diloco.protocol.blocks import Span


def rounded(values: Tensor, *seed: object, position: int = 0) -> Tensor:
    into = torch.empty(values.numel(), dtype=torch.bfloat16)
    RandomRounding(*seed).store(values.clone(), into, position=position)
    return into


def test_a_value_between_two_becomes_either_and_keeps_its_mean() -> None:
    step = 2.0**-7
    values = torch.full((PERIOD,), 1.0 + 0.25 * step)
    found = rounded(values, 1, "weights").float()
    assert set(found.tolist()) == {1.0, 1.0 + step}
    assert abs(float((found - 1.0).mean()) / step - 0.25) < 0.002


def test_values_that_bf16_can_hold_stay() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133, 3.3895313892515355e38])
    assert rounded(values, 3).float().tolist() == values.tolist()


def test_values_that_are_not_finite_become_nan() -> None:
    bits = torch.tensor([0x7F800000, -0x800000, -1, 0x7FFFFFFF], dtype=torch.int32)
    assert rounded(bits.view(torch.float32), 3).isnan().all()


def test_pieces_have_the_bits_of_the_whole_and_seeds_differ() -> None:
    values = torch.linspace(-3.0, 3.0, 4001)
    whole = rounded(values, 5, "weights", position=PERIOD - 1000)
    first = rounded(values[:1500], 5, "weights", position=PERIOD - 1000)
    second = rounded(values[1500:], 5, "weights", position=PERIOD + 500)
    assert torch.equal(whole, torch.cat([first, second]))
    assert not torch.equal(whole, rounded(values, 6, "weights", position=PERIOD - 1000))


def optimizer(numel: int) -> OuterOptimizer:
    dtypes = (torch.bfloat16, torch.bfloat16)
    return OuterOptimizer(lr=0.7, momentum=0.9, numel=numel, dtypes=dtypes)


def test_an_outer_step_of_slices_has_the_bits_of_the_whole() -> None:
    """Slices of a vector in bf16 are what the ranks of a replica hold."""
    numel, cut = 5000, 1777
    weights = torch.linspace(-1.0, 1.0, numel).bfloat16()
    slices = [weights[:cut].clone(), weights[cut:].clone()]
    whole, parts = optimizer(numel), [optimizer(cut), optimizer(numel - cut)]
    for round in (1, 2):
        gradient = torch.linspace(1e-3, -1e-3, numel).mul_(round)
        whole.step(weights, gradient, round=round)
        for part, held, position in zip(parts, slices, (0, cut), strict=True):
            own = gradient[position : position + held.numel()]
            part.step(held, own, Span(0, held.numel()), round=round, position=position)
    assert torch.equal(weights, torch.cat(slices))
    state = torch.cat([part.vectors["momentum"] for part in parts])
    assert torch.equal(whole.vectors["momentum"], state) and state.dtype == torch.bfloat16


def test_updates_below_half_a_step_of_bf16_are_not_lost() -> None:
    weights = torch.ones(20_000).bfloat16()
    outer = OuterOptimizer(
        lr=1.0, momentum=0.0, numel=20_000, dtypes=(torch.bfloat16, torch.float32)
    )
    gradient = torch.full((20_000,), 1e-4)
    for round in range(1, 51):
        outer.step(weights, gradient, round=round)
    assert abs(float(weights.float().mean()) - (1 - 50e-4)) < 2e-4


def test_the_digest_is_that_of_the_values_in_fp32() -> None:
    vector = torch.linspace(-1.0, 1.0, 2**20 + 77).bfloat16()
    assert digest(vector) == digest(vector.float())
