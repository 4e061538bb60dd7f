"""Checkpoints of several ranks, which are threads here, have the bytes of those of one process."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.errors import DamagedObject
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol.pieces import keys_of, read_range
from diloco.protocol.records import CheckpointManifest, Identity
from diloco.protocol.round_view import Totals
from diloco.ranks.jobs import JobWorker
from diloco.ranks.rank_progress import RankState
from diloco.ranks.rank_storage import RankStorage, StorageWork
from diloco.ranks.sliced_layout import SlicedLayout
from diloco.store.base import LocalStore, MissingKey
from diloco.store.metered import MeteredStore, StoreUsage
from diloco.training.checkpoint import load_checkpoint, save_checkpoint

ME = Identity(replica=0, incarnation="00001-00000000")
WIDTH = 1031


class Links:
    """Queues between threads that act as ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues: defaultdict[tuple[int, int], queue.SimpleQueue[Any]] = defaultdict(
            queue.SimpleQueue
        )


class Channel:
    """A :class:`~diloco.ranks.command_channel.CommandChannel` between threads."""

    def __init__(self, links: Links, rank: int) -> None:
        self.rank, self.size, self.is_leader = rank, links.size, rank == 0
        self._queues = links.queues

    def send(self, tensor: Tensor, to: int) -> None:
        self._queues[self.rank, to].put(tensor.clone())

    def receive(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._queues[source, self.rank].get(timeout=60))

    def text(self, text: str = "") -> str:
        return self._of_root(text, 0)

    def gather(self, text: str) -> list[str]:
        return [self._of_root(text, root) for root in range(self.size)]

    def _of_root(self, text: str, root: int) -> str:
        if self.rank != root:
            return str(self._queues[root, self.rank].get(timeout=60))
        for rank in range(self.size):
            if rank != root:
                self._queues[root, rank].put(text)
        return text


class Silent:
    """Ranks whose calls this test repeats itself."""

    def announced(self, call: str, **arguments: Any) -> Any:
        return nullcontext()


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])


class Ranks:
    """The ranks of one replica, all in this process."""

    def __init__(self, root: Path, size: int, dtype: torch.dtype, **cut: Any) -> None:
        self.store = LocalStore(root)
        links = Links(size)
        self.layouts, self.states, works = [], [], []
        for rank in range(size):
            channel: Any = Channel(links, rank)
            layout = SlicedLayout(model(), channel, **cut)
            outer = new_outer(layout.held_numel, dtype)
            self.layouts.append(layout)
            self.states.append(RankState(layout, outer, Silent()))  # type: ignore[arg-type]
            progress: Any = type("Progress", (), {"layout": layout, "state": self.states[rank]})
            works.append((StorageWork(progress, lambda: self.store, channel), channel))
        self.storage = RankStorage(*works[0], MeteredStore(self.store))
        self.workers = [JobWorker(*work, StoreUsage) for work in works[1:]]

    def hold(self, weights: Tensor, momentum: Tensor) -> None:
        for layout, state in zip(self.layouts, self.states, strict=True):
            state.weights = torch.empty(layout.held_numel, dtype=weights.dtype)
            for span, at in layout.held_parts(layout.span(None)):
                held = slice(at, at + span.numel)
                state.weights[held] = weights[span.start : span.stop]
                state.outer.vectors["momentum"][held] = momentum[span.start : span.stop]

    def gathered(self, of: Callable[[RankState], Tensor]) -> Tensor:
        whole = torch.empty(self.layouts[0].numel, dtype=of(self.states[0]).dtype)
        for layout, state in zip(self.layouts, self.states, strict=True):
            for span, at in layout.held_parts(layout.span(None)):
                whole[span.start : span.stop] = of(state)[at : at + span.numel]
        return whole

    def end(self) -> None:
        self.storage.end()
        for worker in self.workers:
            worker.join(60)


def new_outer(numel: int, dtype: torch.dtype) -> OuterOptimizer:
    return OuterOptimizer(lr=1.0, momentum=0.9, numel=numel, dtypes=(dtype, dtype))


CASES = [
    pytest.param(3, torch.float32, {}, id="3 ranks"),
    pytest.param(4, torch.bfloat16, {"fragments": 2}, id="4 ranks, 2 fragments, bf16"),
    pytest.param(3, torch.float32, {"fragments": 4}, id="3 ranks, small fragments"),
]


def saved(
    ranks: Ranks, weights: Tensor, momentum: Tensor, root: Path, **cut: Any
) -> tuple[CheckpointManifest, CheckpointManifest]:
    """Write a checkpoint with all ranks, and in another store with one process."""
    ranks.hold(weights, momentum)
    snapshots = [state.snapshot() for state in ranks.states]
    held, outer = snapshots[0]
    whole = new_outer(weights.numel(), weights.dtype)
    whole.vectors["momentum"].copy_(momentum)
    options: dict[str, Any] = {
        "round": 3,
        "base_rounds": (3,),
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
        LocalStore(root), ME, Layout(model(), **cut), weights=weights, outer=whole, **options
    )
    assert divided is not None and alone is not None
    return divided, alone


@pytest.mark.parametrize(("size", "dtype", "cut"), CASES)
def test_a_checkpoint_of_ranks_has_the_bytes_of_one_process(
    tmp_path: Path, size: int, dtype: torch.dtype, cut: dict[str, int]
) -> None:
    ranks = Ranks(tmp_path / "ranks", size, dtype, **cut)
    numel = ranks.layouts[0].numel
    weights, momentum = torch.randn(numel).to(dtype), torch.randn(numel).to(dtype)
    divided, alone = saved(ranks, weights, momentum, tmp_path / "alone", **cut)
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
    outer = new_outer(numel, dtype)
    restored = load_checkpoint(ranks.store, divided, Layout(model(), **cut), outer)
    assert torch.equal(restored.weights, weights)
    assert torch.equal(outer.vectors["momentum"], momentum)


def test_damage_of_a_piece_is_refused_by_all_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "ranks", 3, torch.float32)
    vector = torch.randn(ranks.layouts[0].numel)
    divided, _ = saved(ranks, vector, vector, tmp_path / "alone")
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
    ranks = Ranks(tmp_path, 1, torch.float32)
    [state] = ranks.states
    state.weights = torch.ones(ranks.layouts[0].held_numel)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(state.written, 1)
        state.snapshot()
        weights, _ = waiting.result(timeout=60)
    assert weights is state.weights
    ranks.end()
