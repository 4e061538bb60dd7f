"""The number of parameters that a checkpoint's manifest can list."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco.model import flat_parameters
from diloco.model.flat_parameters import Layout
from diloco.protocol.records import (
    MAX_TENSORS,
    CheckpointManifest,
    FrozenEntry,
    Identity,
    StoredObject,
    TensorEntry,
)


def model(trained: int, frozen: int) -> nn.ParameterList:
    parameters = nn.ParameterList(torch.ones(1) for _ in range(trained + frozen))
    for parameter in list(parameters)[trained:]:
        parameter.requires_grad_(False)
    return parameters


def test_a_model_of_too_many_tensors_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flat_parameters, "MAX_TENSORS", 5)
    assert len(Layout(model(3, 2)).tensors) == 3
    with pytest.raises(ValueError, match=r"at most 5 .* found 6 \(3 trained, 3 frozen\)"):
        Layout(model(3, 3))
    with pytest.raises(ValueError, match=r"found 6 \(6 trained, 0 frozen\)"):
        Layout(model(6, 0), compare_frozen=False)


def test_the_manifest_of_the_largest_model_can_be_read() -> None:
    half = MAX_TENSORS // 2
    weights = StoredObject(key="checkpoints/00000001/w", size_bytes=1, checksums="0" * 16)
    manifest = CheckpointManifest(
        round=1,
        writer=Identity(replica=0, incarnation="00001-00000000"),
        model_hash="0" * 16,
        base_rounds=tuple(range(64)),
        tensors=tuple(
            TensorEntry(name=f"layers.{n}.weight", shape=(1, 2), dtype="float32")
            for n in range(half)
        ),
        weights_digest="0" * 64,
        weights=weights,
        outer=weights,
        tokens_total=0,
        wall_s=0.0,
        frozen=tuple(
            FrozenEntry(name=f"base.{n}.weight", shape=(1,), dtype="float32", digest="0" * 64)
            for n in range(MAX_TENSORS - half)
        ),
    )
    assert CheckpointManifest.from_bytes(manifest.to_bytes()) == manifest
