"""Writers that lose the race for a checkpoint's manifest delete their own objects only; state in
bf16 is stored as it is, and converted for a group with the other precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.records import CheckpointManifest, Identity
from diloco.protocol.round_view import Totals
from diloco.store.base import LocalStore, Store
from diloco.training.checkpoint import load_checkpoint, newest_manifest, save_checkpoint

FIRST = Identity(replica=0, incarnation="00001-00000000")
SECOND = Identity(replica=1, incarnation="00001-11111111")
LAYOUT = Layout(nn.Linear(2, 2, bias=False))


def outer() -> OuterOptimizer:
    return OuterOptimizer(lr=1.0, momentum=0.9, numel=4)


def save(store: Store, writer: Identity) -> CheckpointManifest | None:
    return save_checkpoint(
        store,
        writer,
        LAYOUT,
        round=3,
        weights=torch.arange(4.0),
        base_rounds=(3,),
        outer=outer(),
        totals=Totals(committed=3, tokens=30),
        wall_s=0.0,
    )


def test_the_objects_of_a_lost_race_are_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert save(store, FIRST) is not None and save(store, SECOND) is None
    assert not list(store.list(keys.checkpoint_dir(3, SECOND.replica, SECOND.incarnation)))


def test_a_checkpoint_that_is_written_again_stays_readable(tmp_path: Path) -> None:
    """A write in the background can become complete after its writer has looked for it."""
    store = LocalStore(tmp_path)
    assert save(store, FIRST) is not None and save(store, FIRST) is None
    manifest = newest_manifest(store)
    assert manifest is not None
    restored = load_checkpoint(store, manifest, LAYOUT, outer())
    assert restored.weights.tolist() == [0, 1, 2, 3]


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("loaded", [FP32, BF16])
@pytest.mark.parametrize("saved", [FP32, BF16])
def test_a_checkpoint_is_loaded_in_the_precision_of_the_group(
    tmp_path: Path, saved: torch.dtype, loaded: torch.dtype
) -> None:
    store = LocalStore(tmp_path)
    source = OuterOptimizer(lr=1.0, momentum=0.9, numel=4, dtypes=(saved, saved))
    source.vectors["momentum"].copy_(torch.arange(4.0))
    manifest = save_checkpoint(
        store,
        FIRST,
        LAYOUT,
        round=3,
        weights=torch.tensor([0.0, 1.0, -2.0, 1.0 + 2.0**-9]).to(saved),
        base_rounds=(3,),
        outer=source,
        totals=Totals(committed=3, tokens=30),
        wall_s=0.0,
    )
    assert manifest is not None
    into = OuterOptimizer(lr=1.0, momentum=0.9, numel=4, dtypes=(loaded, loaded))
    restored = load_checkpoint(store, manifest, LAYOUT, into)
    assert restored.weights.dtype == into.vectors["momentum"].dtype == loaded
    narrow = BF16 in (saved, loaded)
    assert restored.weights.tolist() == [0.0, 1.0, -2.0, 1.0 if narrow else 1.0 + 2.0**-9]
    assert into.vectors["momentum"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_checkpoint_without_outer_state_clears_the_one_of_the_process(tmp_path: Path) -> None:
    """A replica can load checkpoint 0 of a fork again after it has made outer steps."""
    store = LocalStore(tmp_path)
    manifest = save(store, FIRST)
    assert manifest is not None
    into = outer()
    into.vectors["momentum"].fill_(3.0)
    load_checkpoint(store, replace(manifest, outer=None), LAYOUT, into)
    assert into.vectors["momentum"].tolist() == [0.0] * 4
