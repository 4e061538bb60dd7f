"""The ranks of one replica as threads of a test, with channels between them."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.ranks.jobs import JobWorker
from diloco.ranks.rank_progress import RankProgress, RankState
from diloco.ranks.rank_storage import RankStorage
from diloco.ranks.sliced_layout import SlicedLayout
from diloco.ranks.storage_work import StorageWork
from diloco.store.base import LocalStore
from diloco.store.metered import MeteredStore, StoreUsage
from tests.diloco.clocks import ManualClock

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

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        tensor.copy_(self._of_root(tensor.clone(), root))

    def text(self, text: str = "") -> str:
        return str(self._of_root(text, 0))

    def gather(self, text: str) -> list[str]:
        return [str(self._of_root(text, root)) for root in range(self.size)]

    def total(self, number: float) -> float:
        return sum(map(float, self.gather(str(number))))

    def texts(self, text: str) -> list[str]:
        return self.gather(text)

    def _of_root(self, value: Any, root: int) -> Any:
        if self.rank != root:
            return self._queues[root, self.rank].get(timeout=60)
        for rank in range(self.size):
            if rank != root:
                self._queues[root, rank].put(value)
        return value


def three_links(size: int) -> tuple[Links, Links, Links]:
    """Return the links of the three channels of :class:`RankChannels`."""
    return Links(size), Links(size), Links(size)


class RankChannels:
    """The channels of a rank; a test calls the training loops of all ranks itself."""

    def __init__(self, links: tuple[Links, Links, Links], rank: int) -> None:
        self.channel, self.storage, self.exchange = (Channel(each, rank) for each in links)

    def announced(self, call: str, **arguments: Any) -> Any:
        return nullcontext()

    def all_reduce(self, message: Any) -> None:
        pass


def _as_ranks(channels: RankChannels) -> Any:
    return channels


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])


class Ranks:
    """The ranks of one replica, all in this process."""

    def __init__(self, root: Path, size: int, settings: GroupSettings) -> None:
        self.store = LocalStore(root)
        self.works: list[StorageWork] = []
        links = three_links(size)
        channels = self.channels = [RankChannels(links, rank) for rank in range(size)]
        for each in map(_as_ranks, channels):
            layout = SlicedLayout(model(), each.channel, fragments=settings.num_fragments)
            progress = RankProgress(ME, settings, layout, ManualClock(), each)
            inner: Any = SimpleNamespace(own={}, saved=None)
            self.works.append(StorageWork(progress, inner, lambda: self.store, each))
        self.layouts = [work.layout for work in self.works]
        self.states = [work.state for work in self.works]
        self.storage = RankStorage(self.works[0], _as_ranks(channels[0]), MeteredStore(self.store))
        self._workers = [
            JobWorker(work, _as_ranks(each).storage, StoreUsage)
            for work, each in zip(self.works[1:], channels[1:], strict=True)
        ]

    def hold(self, weights: Tensor, momentum: Tensor) -> None:
        """Give each rank its slices of the global state."""
        for layout, state in zip(self.layouts, self.states, strict=True):
            state.weights = torch.empty(layout.held_numel, dtype=weights.dtype)
            for span, at in layout.held_parts(layout.span(None)):
                held = slice(at, at + span.numel)
                state.weights[held] = weights[span.start : span.stop]
                state.outer.vectors["momentum"][held] = momentum[span.start : span.stop]

    def gathered(self, of: Callable[[RankState], Tensor]) -> Tensor:
        """Join the slices of all ranks."""
        whole = torch.empty(self.layouts[0].numel, dtype=of(self.states[0]).dtype)
        for layout, state in zip(self.layouts, self.states, strict=True):
            for span, at in layout.held_parts(layout.span(None)):
                whole[span.start : span.stop] = of(state)[at : at + span.numel]
        return whole

    def end(self) -> None:
        self.storage.end()
        for worker in self._workers:
            worker.join(600)
