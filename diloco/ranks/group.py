"""One replica of many ranks: torchrun, with DDP or FSDP2 inside the replica.

::

    rank 0, the leader            ranks 1..n, the followers
    Group: lease, store,          FollowerGroup: no store at all
    exchange, telemetry
        │ group.step()                │ group.step()
        └── one word, summed ─────────┘   every step: tokens, losses, failures
        ┌── operation: read, write, evaluate, ... ──► the same on every rank
        └── end: done, round, schedule step, data step

The leader runs the very code of a replica with one process. Only what touches the model is shared
(:mod:`diloco.ranks.collective_ops`): the leader announces it, and all ranks do it together. The
ranks of a replica hold one local model: DDP and FSDP2 average their gradients at every inner step,
which is none of this module's business.

An error on any rank reaches all: the failed rank says so in its next word, and the others raise
:class:`~diloco.errors.ReplicaError` with its text. A rank that dies without a word is noticed by
its closed connections. Nothing of this crosses the store: to the group, a replica is one member.

What it leaves out: ranks that come and go inside a replica (torchrun starts all of them again), and
an exchange whose bytes are spread over the ranks' own network cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from diloco.clock import SystemClock
from diloco.errors import ReplicaError
from diloco.membership.graceful_shutdown import Departure
from diloco.model import named_parameters
from diloco.model.flat_parameters import Layout
from diloco.model.inner_state import Inner, Stateful
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings
from diloco.ranks.collective_ops import Operation, Ranks, SharedInner, SharedLayout, whole
from diloco.ranks.command_channel import Channel, Word
from diloco.store.base import Store
from diloco.telemetry.writer import Number
from diloco.training.group import Group
from diloco.training.initial_state import WAIT_S, read_document
from diloco.training.post_round import Evaluate

JOIN_TIMEOUT_S = 600.0
"""How long the ranks of a replica wait for one another until the group's settings are known."""


def join_ranks(
    open_store: Callable[[], Store],
    *,
    model: nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    evaluate: Evaluate | None,
    stateful: Mapping[str, Stateful] | None,
    departure: Departure | None,
    **leaders: Any,
) -> Group:
    """Join a group as one of several ranks of a replica; called on all of them at once.

    ``leaders`` are arguments of :class:`~diloco.group.Group` that only the leader needs, as it
    alone opens the store. What followers get has the same surface.
    """
    ranks = Ranks(Channel(timeout_s=JOIN_TIMEOUT_S), model)
    if not ranks.channel.is_leader:
        inner = SharedInner(inner_optimizer, stateful, ranks)
        follower = FollowerGroup(ranks, _document_from(ranks), inner, evaluate, departure)
        follower._start()
        return cast(Group, follower)
    try:
        with ranks.telling():
            store = open_store()
            document = read_document(store)
            ranks.say(Word(operation=Operation.BEGIN))
            ranks.channel.text(document.to_bytes().decode())
            ranks.channel.timeout_s = _timeout_s(document.settings)
            group = LeaderGroup(
                store,
                ranks,
                model=model,
                inner_optimizer=inner_optimizer,
                evaluate=evaluate,
                stateful=stateful,
                departure=departure,
                **leaders,
            )
            ranks.say(Word(operation=Operation.COMPARE))
            ranks.compare(group.model_hash)
            group._start()
    except BaseException:
        ranks.channel.close()
        raise
    return group


def _document_from(ranks: Ranks) -> GroupDocument:
    """``group.json``, as the leader has read it."""
    try:
        heard = ranks.say(Word())
        ranks.heed_failure(heard)
        document = GroupDocument.from_bytes(ranks.channel.text().encode())
        ranks.channel.timeout_s = _timeout_s(document.settings)
        return document
    except BaseException:
        ranks.channel.close()
        raise


def _timeout_s(settings: GroupSettings) -> float:
    """Longer than anything that the leader may rightly wait for between two words."""
    return 60.0 + max(settings.round_timeout_s, settings.start_wait_s, WAIT_S)


class LeaderGroup(Group):
    """Rank 0 of a replica: the group's member. Made by :func:`join_ranks`."""

    def __init__(
        self, store: Store, ranks: Ranks, *, evaluate: Evaluate | None, **options: Any
    ) -> None:
        self._ranks = ranks
        together = None if evaluate is None else ranks.together(Operation.EVALUATE, evaluate)
        super().__init__(store, evaluate=together, **options)

    @property
    def model_hash(self) -> str:
        return self._loop.state.layout.model_hash

    def _make_layout(self, model: nn.Module) -> Layout:
        return _layout(model, self._ranks, self.settings)

    def _make_inner(
        self, optimizer: torch.optim.Optimizer, stateful: Mapping[str, Stateful] | None
    ) -> Inner:
        return SharedInner(optimizer, stateful, self._ranks)

    def _final_tensors(self) -> dict[str, Tensor]:
        self._ranks.say(Word(operation=Operation.FINAL))
        return {name: tensor.cpu() for name, tensor in named_parameters.state(self._model)}

    def step(
        self,
        *,
        tokens: int,
        loss: Number,
        lr: float | None = None,
        grad_norm: Number = float("nan"),
    ) -> bool:
        """As :meth:`Group.step`, on every rank: tokens are summed over them, and ``loss`` is
        averaged by tokens."""
        if self.done:
            return False
        with self._ranks.telling():
            norm = whole(grad_norm)
            mean = self._ranks.count(tokens=tokens, loss=loss, on_more=self._count_more)
            super().step(tokens=tokens, loss=mean, lr=lr, grad_norm=norm)
            self._end_operations()
        return not self.done

    def _count_more(self, tokens: int) -> None:
        self._loop.work.count_more(tokens)
        self._tokens_seen += tokens
        self._lease.update(tokens=self._tokens_trained)

    def _start(self) -> None:
        super()._start()
        self._end_operations()

    def _end_operations(self) -> None:
        heard = self._ranks.say(
            Word(
                operation=Operation.END,
                done=self.done,
                round=self.round,
                schedule_step=self.schedule_step,
                data_step=self.data_step,
            )
        )
        if self.done:
            self._ranks.channel.text(self.reason)
            self._ranks.channel.close()
        elif heard.gone:
            self._ranks.channel.close()
            raise ReplicaError("another rank of this replica has left its training loop")
        elif heard.leaving:
            self.leave(within_s=heard.leave_within_s / heard.leaving, reason="a rank was asked to")

    def _check(self) -> None:
        super()._check()
        self._ranks.keep_listening()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._ranks.tell(error)
            with self._ending(error):
                super().__exit__(kind, error, trace)
        finally:
            self._ranks.channel.close()

    @contextmanager
    def _ending(self, error: BaseException | None) -> Iterator[None]:
        """Leaving early, without an error, is an operation like a step's."""
        if error is not None or self.done:
            yield
            return
        with self._ranks.telling():
            yield
            self._end_operations()


class FollowerGroup:
    """A rank that is not the leader: the surface of :class:`~diloco.group.Group`, without a store.

    It does what the leader announces. Made by :func:`join_ranks`.
    """

    def __init__(
        self,
        ranks: Ranks,
        document: GroupDocument,
        inner: SharedInner,
        evaluate: Evaluate | None,
        departure: Departure | None,
    ) -> None:
        self.document = document
        self.settings: GroupSettings = document.settings
        self.inner_optimizer = inner.optimizer
        self.done = False
        self.reason = ""
        self.round = 1
        self.schedule_step = 0
        self.data_step = 0
        self._ranks = ranks
        self._inner = inner
        self._evaluate = evaluate
        self._departure = departure or Departure(SystemClock())

    def leave(self, *, within_s: float = 0.0, reason: str = "") -> None:
        """As :meth:`Group.leave`, of the whole replica."""
        self._departure.ask(within_s=within_s, reason=reason)

    def step(
        self,
        *,
        tokens: int,
        loss: Number,
        lr: float | None = None,
        grad_norm: Number = float("nan"),
    ) -> bool:
        """As :meth:`Group.step`; what is reported of ``lr`` and ``grad_norm`` is the leader's."""
        if self.done:
            return False
        whole(grad_norm)
        self._ranks.count(tokens=tokens, loss=loss)
        self._follow(Word())
        return not self.done

    def _start(self) -> None:
        try:
            self._layout = _layout(self._ranks.model, self._ranks, self.settings)
            self._follow(Word())
        except BaseException as error:
            self._ranks.tell(error)
            self._ranks.channel.close()
            raise

    def _follow(self, word: Word) -> None:
        """Do as the leader says until it says that it is done."""
        while True:
            leaving = Word(leaving=self._departure.asked, leave_within_s=self._departure.left_s)
            heard = self._ranks.say(word + leaving)
            self._ranks.heed_failure(heard)
            if heard.operation == Operation.END:
                return self._ended(heard)
            word = Word(gone=word.gone)
            self._do(Operation(int(heard.operation)), int(heard.argument))

    def _do(self, operation: Operation, argument: int) -> None:
        fragment = None if argument < 0 else argument
        match operation:
            case Operation.COMPARE:
                self._ranks.compare(self._layout.model_hash)
            case Operation.READ:
                self._layout.follow_read(fragment)
            case Operation.WRITE:
                self._layout.follow_write(fragment)
            case Operation.EVALUATE:
                if self._evaluate is not None:
                    self._evaluate()
            case Operation.NOTHING:
                pass
            case Operation.FINAL:
                for _ in named_parameters.state(self._ranks.model):
                    pass
            case _:
                self._inner.follow(operation)

    def _ended(self, heard: Word) -> None:
        self.round = int(heard.round)
        self.schedule_step = int(heard.schedule_step)
        self.data_step = int(heard.data_step)
        self.done = bool(heard.done)
        if self.done:
            self.reason = self._ranks.channel.text()
            self._ranks.channel.close()

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
                self._ranks.tell(error)
            elif not self.done:
                self._follow(Word(gone=1))
                if not self.done:
                    raise ReplicaError(
                        "expected all ranks of a replica to leave their training loops together, "
                        f"found that rank {self._ranks.channel.rank} left alone"
                    )
        finally:
            self._ranks.channel.close()


def _layout(model: nn.Module, ranks: Ranks, settings: GroupSettings) -> SharedLayout:
    return SharedLayout(
        model, ranks, fragments=settings.num_fragments, pattern=settings.fragment_pattern
    )
