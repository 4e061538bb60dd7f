"""Checkpoints of several ranks, which are threads here, have the bytes of those of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.errors import DamagedObject
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.model.rounding import DTYPES
from diloco.protocol.pieces import keys_of, read_range
from diloco.protocol.records import CheckpointManifest
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore, MissingKey
from diloco.training.checkpoint import load_checkpoint, save_checkpoint
from tests.diloco.ranks.rank_threads import ME, Ranks, model

CASES = [
    pytest.param(3, {}, id="3 ranks"),
    pytest.param(
        4,
        {"num_fragments": 2, "master_dtype": "bf16", "momentum_dtype": "bf16"},
        id="4 ranks, 2 fragments, bf16",
    ),
    pytest.param(3, {"num_fragments": 4, "sync_every": 48}, id="3 ranks, 4 fragments"),
]


def layout_of(settings: GroupSettings) -> Layout:
    return Layout(model(), fragments=settings.num_fragments)


def saved(
    ranks: Ranks, settings: GroupSettings, weights: Tensor, momentum: Tensor, root: Path
) -> tuple[CheckpointManifest, CheckpointManifest]:
    """Write a checkpoint with all ranks, and in another store with one process."""
    ranks.hold(weights, momentum)
    snapshots = [state.snapshot() for state in ranks.states]
    held, outer = snapshots[0]
    whole = OuterOptimizer.of(settings, weights.numel())
    whole.vectors["momentum"].copy_(momentum)
    options: dict[str, Any] = {
        "round": 3,
        "base_rounds": (3,) * settings.num_fragments,
        "totals": Totals(committed=3, tokens=30),
        "wall_s": 0.0,
    }
    divided = save_checkpoint(
        ranks.store,
        ME,
        ranks.layouts[0],
        weights=held,
        outer=outer,
        storage=ranks.storage,
        **options,
    )
    alone = save_checkpoint(
        LocalStore(root), ME, layout_of(settings), weights=weights, outer=whole, **options
    )
    assert divided is not None and alone is not None
    return divided, alone


@pytest.mark.parametrize(("size", "more"), CASES)
def test_a_checkpoint_of_ranks_has_the_bytes_of_one_process(
    tmp_path: Path, size: int, more: dict[str, Any]
) -> None:
    settings = GroupSettings(**more)
    ranks = Ranks(tmp_path / "ranks", size, settings)
    numel, dtype = ranks.layouts[0].numel, DTYPES[settings.master_dtype]
    weights, momentum = torch.randn(numel).to(dtype), torch.randn(numel).to(dtype)
    divided, alone = saved(ranks, settings, weights, momentum, tmp_path / "alone")
    assert divided.weights_digest == alone.weights_digest
    one = LocalStore(tmp_path / "alone")
    for name in ("weights", "outer"):
        whole, pieces = getattr(alone, name), getattr(divided, name)
        assert len(pieces.pieces) >= size and whole.pieces is None
        assert read_range(ranks.store, pieces, 0, numel * 8) == one.get(whole.key)
    # Either is read by any number of ranks.
    for state in ranks.states:
        state.weights = None
        state.outer.vectors["momentum"].zero_()
    read = ranks.storage.load(divided, ranks.states[0].outer)
    assert (read.round, read.totals) == (3, Totals(committed=3, tokens=30))
    for state in ranks.states:
        assert state.read is not None
    assert torch.equal(ranks.gathered(lambda s: s.read.weights), weights)  # type: ignore[union-attr]
    assert torch.equal(
        ranks.gathered(lambda s: s.read.outer["momentum"]),  # type: ignore[union-attr]
        momentum,
    )
    ranks.end()
    outer = OuterOptimizer.of(settings, numel)
    restored = load_checkpoint(ranks.store, divided, layout_of(settings), outer)
    assert torch.equal(restored.weights, weights)
    assert torch.equal(outer.vectors["momentum"], momentum)


def test_damage_of_a_piece_is_refused_by_all_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "ranks", 3, GroupSettings())
    vector = torch.randn(ranks.layouts[0].numel)
    divided, _ = saved(ranks, GroupSettings(), vector, vector, tmp_path / "alone")
    last = keys_of(divided.weights)[-1]
    data = ranks.store.get(last)
    ranks.store.put(last, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedObject, match=last):
        ranks.storage.load(divided, ranks.states[0].outer)
    ranks.store.delete([last])
    with pytest.raises(MissingKey, match=last):
        ranks.storage.load(divided, ranks.states[0].outer)
    ranks.store.put(last, data)
    assert ranks.storage.load(divided, ranks.states[0].outer).round == 3
    ranks.end()


def test_a_job_waits_for_the_snapshot_of_its_rank(tmp_path: Path) -> None:
    """The leader can be ahead of the training loop of another rank."""
    ranks = Ranks(tmp_path, 1, GroupSettings())
    [state] = ranks.states
    state.weights = torch.ones(ranks.layouts[0].held_numel)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(state.written, 1)
        state.snapshot()
        weights, _ = waiting.result(timeout=60)
    assert weights is state.weights
    ranks.end()
