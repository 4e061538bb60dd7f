"""Whatever the saved state of a replica contains, its next process starts: another process can have
written it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.clock import SystemClock
from diloco.model.flat_parameters import Layout
from diloco.protocol import keys
from diloco.protocol.records import BadRecord, HandedInRound, Identity, ReplicaStateManifest
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from diloco.training.local_progress import LocalProgress
from diloco.training.replica_state import (
    EarlyContribution,
    ReplicaState,
    StateWriter,
    load_replica_state,
)
from diloco.training.stored_objects import put_tensors

ME = Identity(replica=3, incarnation="00001-00000000")
NUMEL = 40


def written(store: LocalStore) -> ReplicaStateManifest:
    state = ReplicaState(round=1, tokens=7, trees={}, residuals={})
    return StateWriter(state).write(store, ME, wall_s=0.0)


@pytest.mark.parametrize("name", ["residual.x", "residual.00", "residual.-1", "left_out."])
def test_tensors_with_another_name_than_a_residual_are_left_out(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    manifest = written(store)
    tensors = {name: torch.ones(5), "residual.0": torch.zeros(5)}
    odd = replace(manifest, tensors=put_tensors(store, manifest.tensors.key, tensors))
    store.put(keys.replica_state_manifest(3, ME.incarnation, 1), odd.to_bytes())
    state = load_replica_state(store, 3)
    assert state is not None and [*state.residuals] == [0]
    assert not state.residuals[0].any()


@pytest.mark.parametrize(
    ("fragment", "residual"),
    [
        (0, torch.ones(NUMEL - 1)),
        (0, torch.ones(1, NUMEL)),
        (0, torch.ones(NUMEL, dtype=torch.float64)),
        (1, torch.ones(NUMEL)),
        (-1, torch.ones(NUMEL)),
    ],
)
def test_a_residual_of_another_model_is_dropped(fragment: int, residual: Tensor) -> None:
    settings = GroupSettings(codec="topk", error_feedback=1.0, warmup_steps=0)
    layout = Layout(nn.Linear(8, 5, bias=False))
    progress = LocalProgress(ME, settings, layout, SystemClock())
    early = {4: EarlyContribution(incarnation=ME.incarnation, residual=residual)}
    saved = ReplicaState(round=1, tokens=0, trees={}, residuals={fragment: residual}, early=early)
    progress.restore(saved, [])
    assert progress.residuals.of == [None]
    if residual.shape == (NUMEL,) and residual.dtype == torch.float32:
        assert progress.early == early, "the round is of the only fragment"
    else:
        assert progress.early[4] == EarlyContribution(incarnation=ME.incarnation)


@pytest.mark.parametrize(
    "values",
    [
        {"tokens": -1},
        {"data_step": -1},
        {"round": 2**40},
        {"handed_in": [{"round": 0, "incarnation": ME.incarnation}]},
        {"handed_in": [{"round": 2, "incarnation": "../../group"}]},
    ],
)
def test_a_manifest_with_numbers_and_names_out_of_range_is_refused(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    manifest = written(LocalStore(tmp_path))
    round = HandedInRound(round=2, incarnation=ME.incarnation)
    assert ReplicaStateManifest.from_bytes(replace(manifest, handed_in=(round,)).to_bytes())
    forged = type(manifest).__new__(type(manifest))
    forged.__dict__.update({**vars(manifest), **values})
    with pytest.raises(BadRecord):
        ReplicaStateManifest.from_bytes(forged.to_bytes())
