"""The outer step: equal bits on every machine, and equal to the formula (invariant I3)."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from torch import nn

from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import (
    ContentDigest,
    OuterOptimizer,
    WeightedSum,
    digest,
    l2_norm,
    rescale,
)
from diloco.protocol.blocks import Span
from tests import torch_process

# NumPy's random numbers, because torch's depend on the CPU's capability.
PROGRAM = """
import numpy as np
import torch
from diloco.model.outer_optimizer import OuterOptimizer, WeightedSum, digest, l2_norm, rescale
from diloco.protocol.blocks import Span
for threads in (1, 2):
    torch.set_num_threads(threads)
    rng = np.random.default_rng(3)
    def randn():
        return torch.from_numpy(rng.standard_normal(300_007, dtype=np.float32))
    w = randn()
    outer = OuterOptimizer(lr=0.7, momentum=0.9, numel=w.numel())
    for _ in range(5):
        mean = WeightedSum(torch.empty(w.numel()))
        for weight in (0.2, 0.3, 0.5):
            mean.add(0, randn(), weight)
        rescale(mean.total, [(Span(0, 70_001), 3.0), (Span(70_001, w.numel()), 5.0)])
        outer.step(w, mean.total)
    print(digest(w), digest(outer.vectors["momentum"]), l2_norm(w).hex())
"""


def _bits(capability: str) -> list[str]:
    """The digests with one thread and with two."""
    result = torch_process.run(
        ["-c", PROGRAM], env=os.environ | {"ATEN_CPU_CAPABILITY": capability}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_outer_step_gives_the_same_bits_on_any_cpu_and_with_any_threads() -> None:
    digests = _bits("default") + _bits("avx2")
    assert len(digests) == 4
    assert len(set(digests)) == 1


def test_the_outer_step_equals_numpy_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal(1001, dtype=np.float32)
    weights, outer = torch.from_numpy(w.copy()), OuterOptimizer(lr=0.7, momentum=0.9, numel=w.size)
    m = np.zeros_like(w)
    for _ in range(4):
        g = rng.standard_normal(w.size, dtype=np.float32)
        outer.step(weights, torch.from_numpy(g.copy()))
        m = m * np.float32(0.9) + g
        w = w - (m * np.float32(0.9) + g) * np.float32(0.7)
    assert np.array_equal(weights.numpy(), w)


def test_the_outer_step_is_nesterov_sgd() -> None:
    weights = torch.linspace(-1, 1, 50)
    parameter = nn.Parameter(weights.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    outer = OuterOptimizer(lr=0.7, momentum=0.9, numel=50)
    for step in range(6):
        gradient = torch.sin(torch.arange(50.0) + step)
        parameter.grad = gradient.clone()
        reference.step()
        outer.step(weights, gradient)
    torch.testing.assert_close(weights, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_the_merge_is_a_weighted_sum_in_order() -> None:
    xs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])]
    mean = WeightedSum(torch.full((3,), 9.0))
    for weight, x in zip((0.25, 0.75), xs, strict=True):
        mean.add(1, x, weight)
    assert mean.total.tolist() == [0.0, 2.5, -1.0]


def test_rescale_sets_the_norm_of_each_piece_and_keeps_zeros() -> None:
    vector = torch.tensor([3.0, 4.0, 0.0, 0.0, 7.0])
    rescale(vector, [(Span(0, 2), 10.0), (Span(2, 4), 10.0)])
    assert vector.tolist() == [6.0, 8.0, 0.0, 0.0, 7.0]


def test_an_outer_step_of_a_fragment_changes_nothing_else() -> None:
    weights, outer = torch.zeros(5), OuterOptimizer(lr=1.0, momentum=0.5, numel=5)
    outer.step(weights, torch.ones(2), Span(2, 4))
    assert weights.tolist() == [0, 0, -1.5, -1.5, 0]
    assert outer.vectors["momentum"].tolist() == [0, 0, 1, 1, 0]


@pytest.mark.parametrize("numel", [0, 1, 3, 1024, 65_536, 200_003])
def test_the_norm_equals_numpys(numel: int) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    assert l2_norm(vector) == pytest.approx(float(vector.double().norm()), rel=1e-12)
    assert math.isnan(l2_norm(torch.tensor([1.0, math.inf])))


class Odd(nn.Module):
    """Tied, frozen, zero-dimensional, empty, bf16, float64 and non-contiguous parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(3, 4)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.halved = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.doubled = nn.Parameter(torch.full((2,), 0.5, dtype=torch.float64))
        self.strided = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.norm = nn.BatchNorm1d(2)


def test_a_layout_reads_and_writes_every_kind_of_parameter() -> None:
    model, layout = Odd(), Layout(Odd())
    layout = Layout(model)
    assert [slot.name for slot in layout.slots].count("a.weight") == 1
    assert not any(slot.name in ("b.weight", "frozen") for slot in layout.slots)
    vector = layout.read().clone()
    assert vector.numel() == layout.numel == sum(slot.numel for slot in layout.slots)
    layout.write(vector + 1)
    assert model.scalar.item() == 3.0
    assert torch.equal(model.strided, torch.arange(6.0).view(2, 3).t() + 1)
    assert model.halved.dtype is torch.bfloat16 and model.doubled.dtype is torch.float64
    assert torch.equal(layout.join(layout.split(vector)), vector)


def test_the_model_hash_differs_between_models() -> None:
    same, other = Layout(nn.Linear(2, 3)), Layout(nn.Linear(3, 2))
    assert same.model_hash == Layout(nn.Linear(2, 3)).model_hash != other.model_hash
    assert Layout(nn.Linear(2, 3).bfloat16()).model_hash != same.model_hash


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="trainable"):
        Layout(nn.ReLU())


def test_tensors_of_another_model_are_refused() -> None:
    layout = Layout(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="model's own tensors"):
        layout.join({"weight": torch.zeros(3, 2)})


def test_a_digest_of_pieces_is_the_digest_of_the_whole() -> None:
    data = memoryview(bytes(range(256)) * 40_000)
    result = ContentDigest()
    result.update(data[: 4 * 2**20])
    result.update(data[4 * 2**20 :])
    whole = ContentDigest()
    whole.update(data)
    assert result.hexdigest() == whole.hexdigest()


def test_the_digest_depends_on_every_bit() -> None:
    assert (
        digest(torch.zeros(3)) == digest(torch.zeros(3)) != digest(torch.tensor([0.0, 0.0, -0.0]))
    )
