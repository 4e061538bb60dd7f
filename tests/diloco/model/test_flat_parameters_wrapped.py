"""Wrappers do not change a model's names, fingerprint, vector or final weights.

``test_ranks.py`` tests models that are sharded over several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Partial, Replicate, Shard

from diloco.model import named_parameters
from diloco.model.flat_parameters import Layout
from diloco.model.named_parameters import own_part


class Model(nn.Module):
    """A model with a submodule called ``module``, like a wrapper's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.module.weight
        self.register_buffer("scale", torch.tensor([2.0]))


def _compiled_block(model: Model) -> nn.Module:
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    return model


def _checkpointed_block(model: Model) -> nn.Module:
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


WRAPPERS: dict[str, Callable[[Model], nn.Module]] = {
    "data parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled data parallel": lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
    "data parallel of compiled": lambda m: nn.DataParallel(torch.compile(m, backend="eager")),
    "a compiled block": _compiled_block,
    "a checkpointed block": _checkpointed_block,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_change_nothing(wrap: Callable[[Model], nn.Module]) -> None:
    bare = Model()
    vector = Layout(bare).read()
    wrapped = Model()
    model = wrap(wrapped)
    layout = Layout(model)
    assert [slot.name for slot in layout.tensors] == [
        "module.weight",
        "module.bias",
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.1.weight",
        "blocks.1.bias",
    ]
    assert layout.model_hash == Layout(bare).model_hash
    layout.write(vector)
    assert torch.equal(wrapped.module.weight, bare.module.weight)
    assert torch.equal(Layout(model).read(), vector)
    expected, result = dict(named_parameters.state(bare)), dict(named_parameters.state(model))
    assert list(result) == list(expected)
    assert set(result) == {slot.name for slot in layout.tensors} | {"scale"}, "the tied one once"
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_a_model_sharded_by_fsdp1_is_refused() -> None:
    class FullyShardedDataParallel(nn.Module):
        """Looks like FSDP1 from outside; the real class needs a process group."""

        def __init__(self) -> None:
            super().__init__()
            self._fsdp_wrapped_module = nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"expected a model sharded by .*fully_shard, found one"):
        Layout(FullyShardedDataParallel())


@dataclass(frozen=True)
class Place:
    """A rank's place in a mesh of these sizes."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def size(self, dimension: int) -> int:
        return self.sizes[dimension]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dimension", [0, 1])
def test_the_parts_of_all_ranks_are_the_whole_tensor(ranks: int, dimension: int) -> None:
    full = torch.arange(12.0).view(3, 4)
    parts = [own_part(full, Place((ranks,), (rank,)), [Shard(dimension)]) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts, dimension), full)
    expected, _ = Shard(dimension)._split_tensor(full, ranks, with_padding=False)
    assert [part.numel() for part in parts] == [part.numel() for part in expected]


def test_a_mesh_of_two_dimensions_divides_one_after_the_other() -> None:
    full = torch.arange(12.0).view(3, 4)
    found = own_part(full, Place((2, 2), (1, 0)), [Shard(0), Shard(1)])
    assert torch.equal(found, full[2:, :2])
    whole = own_part(full, Place((2, 2), (1, 1)), [Replicate(), Shard(1)])
    assert torch.equal(whole, full[:, 2:])


def test_another_placement_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the placements Shard and Replicate, found"):
        own_part(torch.ones(2), Place((2,), (0,)), [Partial()])
