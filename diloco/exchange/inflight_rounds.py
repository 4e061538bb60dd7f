"""Rounds in flight: contributed, not yet applied.

Without overlap the caller waits for a round's exchange. With overlap it runs in a thread during the
``overlap_steps`` inner steps that follow. Several rounds can then be in flight; they are closed in
order, each after its steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from torch import Tensor

from diloco.errors import RunOver, StopTraining
from diloco.exchange.round_observer import Base
from diloco.exchange.round_settlement import RoundResult, Sent
from diloco.exchange.step_accounting import LocalWork, StepMark
from diloco.exchange.timings import Timings
from diloco.store.daemon import DaemonPool

log = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
MEANWHILE_EVERY_S = 1.0
SENT_EVERY_S = 0.05
ENDED_S = 60.0
"""For how long :meth:`InflightRounds.end` waits: as long as a request is tried again."""


@dataclass(frozen=True)
class MissedRound:
    """The round was committed before this replica contributed to it."""


@dataclass(kw_only=True)
class InflightRound:
    """A round that this replica has trained for.

    ``gradient`` (n,) is ``base - local`` of the fragment when its steps ended, ``contributed`` what
    was sent of it (with error feedback; the same tensor without). ``began`` are the counts when its
    steps began. ``due_steps`` is the inner step after which it is to be applied. ``sent`` is there
    once the contribution is durable. ``cosine`` is that of what was contributed to the mean that
    took it, once the round is settled. ``is_awaited`` False: no process waited for this replica
    when its steps ended, so the round was not decided without it.
    """

    round: int
    fragment: int
    base: Base
    mark: StepMark
    due_steps: int
    work: LocalWork
    gradient: Tensor
    contributed: Tensor
    timings: Timings
    began: StepMark
    started_wall_s: float
    compute_s: float
    sent: Sent | None = None
    is_awaited: bool = True
    cosine: float | None = None


ExchangeOutcome = RoundResult | MissedRound


class InflightRounds:
    """The queue of rounds in flight. ``exchange`` does the store operations of one round, in a
    thread; ``at_once`` rounds run concurrently."""

    def __init__(
        self, exchange: Callable[[InflightRound], ExchangeOutcome], *, at_once: int
    ) -> None:
        self._exchange = exchange
        self._queue: deque[tuple[InflightRound, Future[ExchangeOutcome]]] = deque()
        self._dropped: list[Future[ExchangeOutcome]] = []
        self._pool = DaemonPool(at_once, "exchange")

    def __len__(self) -> int:
        return len(self._queue)

    def begin(self, opened: InflightRound) -> None:
        """Start the exchange of a round in the background."""
        self._queue.append((opened, self._pool.submit(self._exchange, opened)))

    def due(self, steps: int) -> bool:
        """Return whether the oldest round is to be closed after inner step ``steps``."""
        return bool(self._queue) and self._queue[0][0].due_steps <= steps

    def first(self) -> InflightRound:
        """Return the oldest round."""
        return self._queue[0][0]

    def close(
        self,
        check: Callable[[], None],
        *,
        meanwhile: Callable[[], None] = lambda: None,
        afterwards: Callable[[], None] = lambda: None,
    ) -> ExchangeOutcome:
        """Wait for the oldest round's exchange, remove the round and return the result.

        Raises the exception of the exchange. A round interrupted by
        :class:`~diloco.errors.StopTraining` stays in the queue and can be resumed. ``check`` is
        called every :data:`CHECK_EVERY_S` in the calling thread, ``meanwhile`` every second, and
        ``afterwards`` once the exchange has ended; it can interrupt the round too.
        """
        _, future = self._queue[0]
        try:
            seconds = 0.0
            while not wait([future], timeout=MEANWHILE_EVERY_S).done:
                meanwhile()
                seconds += MEANWHILE_EVERY_S
                if seconds >= CHECK_EVERY_S:
                    check()
                    seconds = 0.0
            afterwards()
            exchanged = future.result()
        except StopTraining:
            raise
        except BaseException:
            self._queue.popleft()
            raise
        self._queue.popleft()
        return exchanged

    def await_contributions(
        self, check: Callable[[], None], *, is_durable: Callable[[InflightRound], bool]
    ) -> None:
        """Wait until the contribution to each round is durable or its exchange has ended.

        Raises :class:`~diloco.errors.StopTraining` of ``check``, which is called every
        :data:`SENT_EVERY_S`, or of an exchange that was interrupted before its contribution.
        """
        for opened, future in list(self._queue):
            while not is_durable(opened) and not wait([future], timeout=SENT_EVERY_S).done:
                check()
            if not is_durable(opened) and _was_interrupted(future):
                future.result()

    def resume(self) -> None:
        """Restart the interrupted exchanges."""
        self._queue = deque(
            (
                opened,
                self._pool.submit(self._exchange, opened) if _was_interrupted(future) else future,
            )
            for opened, future in self._queue
        )

    def has(self, round: int) -> bool:
        return any(opened.round == round for opened, _ in self._queue)

    def has_fragment(self, fragment: int) -> bool:
        return any(opened.fragment == fragment for opened, _ in self._queue)

    def unsent(self) -> int | None:
        """Return the oldest round whose contribution is not durable yet, None if there is none."""
        return next((opened.round for opened, _ in list(self._queue) if opened.sent is None), None)

    def drop_before(self, round: int) -> None:
        """Drop the rounds before ``round``; their threads end by themselves."""
        self._dropped = [exchange for exchange in self._dropped if not exchange.done()]
        while self._queue and self._queue[0][0].round < round:
            self._dropped.append(self._queue.popleft()[1])

    def end(self) -> list[InflightRound]:
        """Wait for the exchanges, whose ``check`` raises by now, at most :data:`ENDED_S`; log the
        errors of those that failed, and return the rounds with a durable contribution, oldest
        first."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        exchanges = [*self._dropped, *(exchange for _, exchange in self._queue)]
        if wait(exchanges, timeout=ENDED_S).not_done:
            log.error("the exchange has not ended: a request of the store hangs")
        for opened, exchange in self._queue:
            error = _error_of(exchange)
            if error is not None and not isinstance(error, StopTraining | RunOver):
                name = type(error).__name__
                log.error("the exchange of round %d has failed: %s: %s", opened.round, name, error)
        contributed = [opened for opened, _ in self._queue if opened.sent is not None]
        self._queue.clear()
        return contributed


def _was_interrupted(future: Future[ExchangeOutcome]) -> bool:
    return isinstance(_error_of(future), StopTraining)


def _error_of(future: Future[ExchangeOutcome]) -> BaseException | None:
    """Return the exception of an exchange that has ended, None if it has none or goes on."""
    return future.exception() if future.done() and not future.cancelled() else None
