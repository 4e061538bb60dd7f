"""A replica of several ranks: torchrun, with DDP or FSDP2 inside the replica.

::

    rank 0, the leader            ranks 1..n, the followers
    Group: lease, records,        FollowerGroup
    decisions, telemetry
        │ group.step()                │ group.step()
        └── one summed message ───────┘   every step: tokens, losses, failures
        ┌── operation: open, apply, evaluate, ... ──► the same on every rank
        └── end: done, round, schedule step, data step

        ┌── job: upload, reduce ──► a thread of every rank, on its slice of the fragment
        ┌── job: put, load ───────► another thread of every rank, on its slices of the model

The leader runs the same code as a replica of one process. Each rank holds a slice of the global
weights and of the outer optimizer (:mod:`diloco.ranks.sliced_layout`). Operations on them are
collective: the leader announces them, and all ranks execute them
(:mod:`diloco.ranks.rank_progress`). The ranks share uploads and reductions
(:mod:`diloco.ranks.rank_exchange`) and checkpoints (:mod:`diloco.ranks.rank_storage`). They hold
one local model, whose gradients DDP or FSDP2 averages at every inner step, independent of this
module.

An error on any rank reaches all ranks: the failed rank reports it in its next message, and the
others raise :class:`~diloco.errors.ReplicaError` with its text. If a rank dies without a message,
its connections close. A replica is one member of its group, whatever its number of ranks.

Not supported: elastic ranks inside a replica (torchrun restarts all of them).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import TracebackType
from typing import TypeVar, cast

from torch import Tensor, nn

from diloco.errors import ReplicaError
from diloco.model import named_parameters
from diloco.model.flat_parameters import Layout
from diloco.model.inner_state import Inner, Stateful
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.records import StoredObject
from diloco.protocol.settings import GroupSettings
from diloco.ranks.collective_ops import (
    Operation,
    Ranks,
    SharedInner,
    SharedRoundHooks,
    to_full_tensor,
)
from diloco.ranks.command_channel import CommandChannel, StepMessage
from diloco.ranks.final_weights import put_final
from diloco.ranks.follower import FollowerGroup, make_progress
from diloco.ranks.rank_exchange import RankTeam, RankWork
from diloco.ranks.rank_progress import RankProgress
from diloco.ranks.rank_storage import RankStorage
from diloco.ranks.storage_work import StorageWork
from diloco.store.base import Store
from diloco.telemetry.writer import Number
from diloco.training.context import ReplicaContext
from diloco.training.group import Group
from diloco.training.initial_state import checkpoint_wait_s, read_document
from diloco.training.join_options import JoinOptions
from diloco.training.local_progress import LocalProgress

T = TypeVar("T")
JOIN_TIMEOUT_S = 600.0
"""Timeout between the ranks until the group's settings are known."""


def join_ranks(
    open_group: Callable[[], Store], options: JoinOptions, *, open_store: Callable[[], Store]
) -> Group:
    """Join a group as one of several ranks of a replica; all ranks call this together.

    The leader opens the store with ``open_group``, which can create the group; a follower with
    ``open_store``, when it first has a part of an exchange. Followers get a
    :class:`~diloco.ranks.follower.FollowerGroup`, with the interface of
    :class:`~diloco.training.group.Group`.
    """
    channel, exchange, storage = (CommandChannel(timeout_s=JOIN_TIMEOUT_S) for _ in range(3))
    ranks = Ranks(channel, options.model, exchange=exchange, storage=storage)
    if not ranks.channel.is_leader:
        follower = FollowerGroup(ranks, _document_from(ranks), options, open_store)
        follower._start()
        return cast(Group, follower)
    try:
        with ranks.sending_errors():
            store = open_group()
            document = read_document(store)
            ranks.all_reduce(StepMessage(operation=Operation.BEGIN))
            ranks.channel.text(document.to_bytes().decode())
            ranks.set_timeout(_timeout_s(document.settings))
            group = LeaderGroup(store, ranks, options)
            ranks.all_reduce(StepMessage(operation=Operation.COMPARE))
            ranks.channel.text(json.dumps(asdict(group.identity)))
            ranks.compare(group.layout)
            group._start()
    except BaseException:
        ranks.close()
        raise
    return group


def _document_from(ranks: Ranks) -> GroupDocument:
    """Receive ``group.json`` from the leader."""
    try:
        received = ranks.all_reduce(StepMessage())
        ranks.raise_remote_failure(received)
        document = GroupDocument.from_bytes(ranks.channel.text().encode())
        ranks.set_timeout(_timeout_s(document.settings))
        return document
    except BaseException:
        ranks.close()
        raise


def _timeout_s(settings: GroupSettings) -> float:
    """Return a timeout longer than any wait of the leader between two messages."""
    return 60.0 + max(settings.start_wait_s, checkpoint_wait_s(settings))


class LeaderGroup(Group):
    """Rank 0 of a replica, which is the member of the group. Created by :func:`join_ranks`."""

    def __init__(self, store: Store, ranks: Ranks, options: JoinOptions) -> None:
        self._ranks = ranks
        if options.evaluate is not None:
            evaluate = ranks.run_on_all_ranks(Operation.EVALUATE, options.evaluate)
            options = replace(options, evaluate=evaluate)
        super().__init__(store, options)
        ranks.on_leaving = lambda within_s: self.leave(
            within_s=within_s, reason="shutdown of a rank"
        )
        self._loop.tasks.hooks = SharedRoundHooks(ranks)

    @property
    def layout(self) -> Layout:
        return self._loop.state.layout

    def _make_progress(self, model: nn.Module) -> LocalProgress:
        return make_progress(self._ranks, self.identity, self.settings, self._options)

    def _with_team(
        self, context: ReplicaContext, progress: LocalProgress, inner: Inner
    ) -> ReplicaContext:
        assert isinstance(progress, RankProgress) and isinstance(inner, SharedInner)
        exchange = self._ranks.exchange

        def store() -> Store:
            return context.store

        work = RankWork(progress, store, context.settings, exchange, context.clock)
        team = RankTeam(work, exchange, context.metered, context.identity)
        storage_work = StorageWork(progress, inner, store, self._ranks)
        rank_storage = RankStorage(storage_work, self._ranks, context.metered)
        self._jobs = (team, rank_storage)
        return replace(context, team=team, storage=rank_storage)

    def _make_inner(self, stateful: Mapping[str, Stateful] | None) -> Inner:
        return SharedInner(self.inner_optimizers, stateful, self._ranks)

    def _write_global(self) -> None:
        with self._ranks.sending_errors():
            super()._write_global()
            self._end_operations()

    def _final_tensors(self) -> dict[str, Tensor]:
        return self._published(named_parameters.unread_state(self._model))

    def _put_final(self, store: Store, key: str, tensors: Mapping[str, Tensor]) -> StoredObject:
        return put_final(self._ranks, store, key, tensors)

    def step(
        self,
        *,
        tokens: int,
        loss: Number,
        lr: float | None = None,
        grad_norm: Number = float("nan"),
    ) -> bool:
        """Like :meth:`Group.step`, on every rank: tokens are summed over the ranks, and ``loss`` is
        averaged, weighted by tokens."""
        if self.done:
            return False
        with self._ranks.sending_errors():
            norm = to_full_tensor(grad_norm)
            mean = self._ranks.count(tokens=tokens, loss=loss, on_more=self._count_more)
            super().step(tokens=tokens, loss=mean, lr=lr, grad_norm=norm)
            self._end_operations()
        return not self.done

    def _count_more(self, tokens: int) -> None:
        self._loop.counter.count_more(tokens)
        self._tokens_seen += tokens
        self._lease.update(tokens=self._tokens_trained)

    def _start(self) -> None:
        super()._start()
        self._end_operations()

    def _end_operations(self) -> None:
        received = self._ranks.all_reduce(
            StepMessage(
                operation=Operation.END,
                done=self.done,
                round=self.round,
                schedule_step=self.schedule_step,
                data_step=self.data_step,
            )
        )
        if self.done:
            for jobs in self._jobs:
                jobs.end()
            self._ranks.channel.text(self.reason)
            self._ranks.close()
        elif received.gone:
            self._ranks.close()
            raise ReplicaError("another rank of this replica has left its training loop")

    def _check(self) -> None:
        super()._check()
        self._ranks.keep_alive()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._ranks.send_error(error)
            with self._ending(error):
                super().__exit__(kind, error, trace)
        finally:
            for jobs in self._jobs:
                jobs.stop()
            self._ranks.close()

    @contextmanager
    def _ending(self, error: BaseException | None) -> Iterator[None]:
        """Send the end of operations to the followers when the leader leaves without an error."""
        if error is not None or self.done:
            yield
            return
        with self._ranks.sending_errors():
            yield
            self._end_operations()
