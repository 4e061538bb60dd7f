"""Rounds on their way: contributed, not yet applied.

Without overlap a round is exchanged while the caller waits; with it, in a thread, during the
``overlap_steps`` inner steps that follow. Then several rounds may be open, and they are closed in
order, each when its steps are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from torch import Tensor

from diloco.errors import Leaving
from diloco.exchange.round_exchange import Sent, Settled, Timings
from diloco.exchange.round_observer import Base
from diloco.exchange.step_accounting import LocalWork, Mark

CHECK_EVERY_S = 20.0
MEANWHILE_EVERY_S = 1.0


@dataclass(frozen=True)
class TooLate:
    """The round was committed before this replica had contributed to it."""


@dataclass(kw_only=True)
class OpenRound:
    """A round that this replica has worked for.

    ``gradient`` (n,) is ``base - local`` of the fragment when its steps ended, ``contributed`` what
    was sent of it (with error feedback; the same tensor without). ``due_steps`` is the inner step
    after which it is to be applied. ``sent`` is there once the contribution is durable. ``lives``
    until the local weights, and with them what was contributed, are thrown away. ``cosine`` is
    that of what was contributed to the mean that took it, once the round is settled.
    """

    round: int
    fragment: int
    base: Base
    mark: Mark
    due_steps: int
    work: LocalWork
    gradient: Tensor
    contributed: Tensor
    timings: Timings
    started_wall_s: float
    compute_s: float
    sent: Sent | None = None
    lives: bool = True
    cosine: float | None = None


Exchanged = Settled | TooLate


class OpenRounds:
    """The queue. ``exchange`` does one round's I/O and may be called from a thread."""

    def __init__(self, exchange: Callable[[OpenRound], Exchanged], *, at_once: int) -> None:
        self._exchange = exchange
        self._queue: deque[tuple[OpenRound, Future[Exchanged]]] = deque()
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="exchange")

    def __len__(self) -> int:
        return len(self._queue)

    def begin(self, opened: OpenRound) -> None:
        """Exchange it in the background."""
        self._queue.append((opened, self._pool.submit(self._exchange, opened)))

    def due(self, steps: int) -> bool:
        """Whether the oldest is to be closed now."""
        return bool(self._queue) and self._queue[0][0].due_steps <= steps

    def first(self) -> OpenRound:
        return self._queue[0][0]

    def close(
        self, check: Callable[[], None], *, meanwhile: Callable[[], None] = lambda: None
    ) -> Exchanged:
        """Wait for the oldest one's exchange, then take it out; raises what the exchange raised.

        One that was broken off by :class:`~diloco.errors.Leaving` stays, and may be resumed.
        ``check`` is called now and then in the caller's own thread, ``meanwhile`` every second.
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
            exchanged = future.result()
        except Leaving:
            raise
        except BaseException:
            self._queue.popleft()
            raise
        self._queue.popleft()
        return exchanged

    def resume(self) -> None:
        """Go on with exchanges that were broken off."""
        self._queue = deque(
            (opened, self._pool.submit(self._exchange, opened) if _was_left(future) else future)
            for opened, future in self._queue
        )

    def has(self, round: int) -> bool:
        return any(opened.round == round for opened, _ in self._queue)

    def has_fragment(self, fragment: int) -> bool:
        return any(opened.fragment == fragment for opened, _ in self._queue)

    def thrown_away(self) -> None:
        """What the open rounds were sent of is no longer in the local weights."""
        for opened, _ in self._queue:
            opened.lives = False

    def unsent(self) -> int | None:
        """The oldest round whose contribution is not durable yet."""
        return next((opened.round for opened, _ in list(self._queue) if opened.sent is None), None)

    def drop_before(self, round: int) -> None:
        """Forget rounds that have been overtaken; their threads see that for themselves."""
        while self._queue and self._queue[0][0].round < round:
            self._queue.popleft()

    def end(self) -> list[OpenRound]:
        """Wait for the threads, which have been told to leave; those whose contribution is durable,
        oldest first."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        contributed = [opened for opened, _ in self._queue if opened.sent is not None]
        self._queue.clear()
        return contributed


def _was_left(future: Future[Exchanged]) -> bool:
    return future.done() and isinstance(future.exception(), Leaving)
