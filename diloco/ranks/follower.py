"""A rank of a replica other than the leader (:mod:`diloco.ranks.group`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from torch.utils.hooks import RemovableHandle

from diloco.clock import SystemClock
from diloco.errors import ReplicaError
from diloco.membership.graceful_shutdown import GracefulShutdown
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.ranks.collective_ops import (
    FAREWELL_S,
    Operation,
    Ranks,
    SharedInner,
    to_full_tensor,
)
from diloco.ranks.command_channel import StepMessage
from diloco.ranks.final_weights import exhaust, read_all
from diloco.ranks.jobs import FollowerStore, JobWorker
from diloco.ranks.rank_exchange import RankWork
from diloco.ranks.rank_progress import RankProgress
from diloco.ranks.sliced_layout import SlicedLayout
from diloco.ranks.storage_work import StorageWork
from diloco.store.base import Store
from diloco.telemetry.writer import Number
from diloco.training.hooks import BeforeRound, RoundHooks, RoundWatcher
from diloco.training.join_options import JoinOptions, layout_options
from diloco.training.progress import OnRound, RoundProgress

T = TypeVar("T")


def make_progress(
    ranks: Ranks, identity: Identity, settings: GroupSettings, options: JoinOptions
) -> RankProgress:
    """Create this rank's part of the state, equally on all ranks."""
    layout = SlicedLayout(ranks.model, ranks.channel, **layout_options(settings, options))
    clock = options.clock or SystemClock()
    return RankProgress(identity, settings, layout, clock, ranks)


class FollowerGroup:
    """A rank other than the leader, with the interface of :class:`~diloco.group.Group`.

    It executes the operations that the leader announces, and in a thread its part of the exchanges.
    Created by :func:`join_ranks`.
    """

    def __init__(
        self,
        ranks: Ranks,
        document: GroupDocument,
        options: JoinOptions,
        open_store: Callable[[], Store],
    ) -> None:
        self.document = document
        self.settings: GroupSettings = document.settings
        self.inner_optimizers = options.inner_optimizers
        self.replica: int  # known when the join returns
        self.done = False
        self.reason = ""
        self.round = 1
        self.schedule_step = 0
        self.data_step = 0
        self._ranks = ranks
        self._inner = SharedInner(options.inner_optimizers, options.stateful, ranks)
        self._options = options
        self._evaluate = options.evaluate
        self._shutdown = options.graceful_shutdown or GracefulShutdown(SystemClock())
        self._hooks = RoundHooks()
        self._open_store = open_store
        self._progress: RankProgress | None = None
        self._storage: StorageWork | None = None
        self._workers: list[JobWorker] = []

    def checkpoint(self) -> None:
        """Do nothing: :meth:`Group.checkpoint` on the leader requests it."""

    def evaluate(self, evaluation: Callable[[], T]) -> T:
        """Like :meth:`Group.evaluate`, on every rank; each rank calls its own function."""
        if self.done:
            return evaluation()
        assert self._progress is not None
        with self._progress.layout.restored():
            self._follow(StepMessage())
            return evaluation()

    def watch(self, watcher: RoundWatcher) -> None:
        """Do nothing: the leader's watcher follows the contributions of the replica."""

    def register_round_hook(
        self, *, before: BeforeRound | None = None, after: OnRound | None = None
    ) -> RemovableHandle:
        """Like :meth:`Group.register_round_hook`, on every rank."""
        return self._hooks.register(before=before, after=after)

    def leave(self, *, within_s: float = 0.0, reason: str = "") -> None:
        """Like :meth:`Group.leave`; the whole replica leaves."""
        self._shutdown.request(within_s=within_s, reason=reason)

    def step(
        self,
        *,
        tokens: int,
        loss: Number,
        lr: float | None = None,
        grad_norm: Number = float("nan"),
    ) -> bool:
        """Like :meth:`Group.step`; ``lr`` and ``grad_norm`` are reported by the leader only."""
        if self.done:
            return False
        self._hooks.check()
        to_full_tensor(grad_norm)
        mean = self._ranks.count(tokens=tokens, loss=loss)
        assert self._progress is not None
        self._progress.counter.count(tokens=tokens, loss=mean)
        self._follow(StepMessage())
        return not self.done

    def _start(self) -> None:
        try:
            self._follow(StepMessage())
        except BaseException as error:
            self._ranks.send_error(error)
            self._close()
            raise

    def _begin(self) -> None:
        """Receive the identity of the replica's process, and compare the models."""
        ranks = self._ranks
        identity = Identity(**json.loads(ranks.channel.text()))
        self.replica = identity.replica
        self._progress = make_progress(ranks, identity, self.settings, self._options)
        ranks.compare(self._progress.layout)
        clock, progress = SystemClock(), self._progress
        stores = [FollowerStore(self._open_store, clock) for _ in range(2)]
        exchange = RankWork(progress, stores[0].open, self.settings, ranks.exchange, clock)
        storage = self._storage = StorageWork(progress, self._inner, stores[1].open, ranks)
        self._workers = [
            JobWorker(exchange, ranks.exchange, stores[0].usage),
            JobWorker(storage, ranks.storage, stores[1].usage),
        ]

    def _close(self) -> None:
        """Close the channels. The workers end when the leader has ended or closed its own."""
        for worker in self._workers:
            worker.join(FAREWELL_S)
        self._ranks.close()

    def _follow(self, message: StepMessage) -> None:
        """Execute the leader's operations until it announces the end."""
        while True:
            shutdown = self._shutdown
            leaving = StepMessage(leaving=shutdown.is_requested, leave_within_s=shutdown.left_s)
            received = self._ranks.all_reduce(message + leaving)
            self._ranks.raise_remote_failure(received)
            if received.operation == Operation.END:
                return self._ended(received)
            message = StepMessage(gone=message.gone)
            self._do(Operation(int(received.operation)), int(received.argument))

    def _do(self, operation: Operation, argument: int) -> None:
        match operation:
            case Operation.COMPARE:
                self._begin()
            case Operation.STATE:
                assert self._progress is not None
                self._progress.follow(*self._ranks.announced_call())
            case Operation.COPY:
                assert self._storage is not None
                self._storage.follow_copy()
            case Operation.EVALUATE:
                if self._evaluate is not None:
                    self._evaluate()
            case Operation.BEFORE_ROUND:
                self._hooks.before(argument)
            case Operation.AFTER_ROUND:
                self._hooks.after(RoundProgress(**json.loads(self._ranks.channel.text())))
            case Operation.NOTHING:
                pass
            case Operation.FINAL:
                exhaust(read_all(self._ranks.model))
            case _:
                self._inner.follow(operation)

    def _ended(self, received: StepMessage) -> None:
        self.round = int(received.round)
        self.schedule_step = int(received.schedule_step)
        self.data_step = int(received.data_step)
        self.done = bool(received.done)
        if self.done:
            self.reason = self._ranks.channel.text()
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._ranks.send_error(error)
            elif not self.done:
                self._follow(StepMessage(gone=1))
                if not self.done:
                    raise ReplicaError(
                        "expected all ranks of a replica to leave their training loops together, "
                        f"found that rank {self._ranks.channel.rank} left alone"
                    )
        finally:
            self._close()
