"""State trees: the states of torch's optimizers round-trip, and other values are refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load as load_safetensors
from torch import nn

from diloco.model.state_tree import join_tree, split_tree
from diloco.model.tensor_file import TensorWriter


def test_an_optimizers_state_round_trips_through_json() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    skeleton, tensors = split_tree(optimizer.state_dict())
    again = join_tree(json.loads(json.dumps(skeleton)), tensors)
    other = torch.optim.AdamW(model.parameters(), lr=0.5)
    other.load_state_dict(again)
    assert other.param_groups[0]["lr"] == 0.1 and other.param_groups[0]["betas"] == (0.9, 0.999)
    for parameter, state in optimizer.state.items():
        assert torch.equal(other.state[parameter]["exp_avg"], state["exp_avg"])
        assert other.state[parameter]["step"] == state["step"]


def test_tuples_numeric_keys_and_shared_tensors_are_preserved() -> None:
    shared = torch.arange(4.0)
    tree = {1: (shared, [shared[:2]]), "1": None, "n": {"deep": True}}
    skeleton, tensors = split_tree(tree)
    stored = load_safetensors(b"".join(TensorWriter(tensors).parts()))
    again = join_tree(json.loads(json.dumps(skeleton)), stored)
    assert set(again) == {1, "1", "n"} and isinstance(again[1], tuple)
    assert torch.equal(again[1][1][0], torch.tensor([0.0, 1.0]))
    assert len({tensor.data_ptr() for tensor in stored.values()}) == 2


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": [object()]}, r"state\.a\[0\]: expected plain values and tensors, found object"),
        ({"f": print}, r"state\.f: .* found builtin_function_or_method"),
        ({(1, 2): 3}, r"state: expected keys of str or int, found \(1, 2\)"),
    ],
)
def test_other_values_are_refused_with_their_path(tree: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        split_tree(tree)


@pytest.mark.parametrize("skeleton", [{"tensor": "7"}, {"exec": "rm"}, {"list": 3}])
def test_a_skeleton_that_does_not_match_is_refused(skeleton: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        join_tree(skeleton, {})
