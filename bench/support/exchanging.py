"""Bare exchanges: members of a group without model, training, lease thread or outer step.

The rest is the cost of the exchange itself. A member has put its lease once, and the groups made
by :func:`bare_settings` have long timeouts, so that all members count as alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from diloco.clock import Clock, SystemClock
from diloco.exchange.round_exchange import Exchange, RoundResult, Sent, Timings
from diloco.exchange.round_observer import Base, RoundObserver
from diloco.exchange.step_accounting import LocalWork
from diloco.membership.lease import Lease
from diloco.membership.observer import REPLICA, SYNCER, Observer
from diloco.model.fragments import Slot, Table
from diloco.protocol import keys
from diloco.protocol.records import Heartbeat, Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store

SYNCER_NUMBER = 64
CLOCK = SystemClock()


def bare_settings(*, replicas: int, plan: str, codec: str = "fp32", **others: Any) -> GroupSettings:
    return GroupSettings(
        num_replicas=replicas,
        min_quorum=replicas,
        max_replicas=SYNCER_NUMBER,
        warmup_steps=0,
        total_rounds=1000,
        heartbeat_timeout_s=3000.0,
        round_timeout_s=6000.0,
        reduce_plan=plan,
        codec=codec,
        **others,
    )


def bare_table(sizes: Sequence[int]) -> Table:
    """One fragment of tensors of these numbers of elements."""
    slots = [Slot(name=f"t{i}", shape=(n,), dtype="float32", numel=n) for i, n in enumerate(sizes)]
    return Table(slots, fragments=1, pattern="size")


class BareMember:
    """One replica's side of every round, or with the number ``SYNCER_NUMBER`` the syncer's."""

    def __init__(
        self,
        store: Store,
        number: int,
        settings: GroupSettings,
        sizes: Sequence[int],
        *,
        clock: Clock = CLOCK,
    ) -> None:
        self.identity = Identity(replica=number, incarnation=f"00001-{number:08x}")
        self.is_syncer = number == SYNCER_NUMBER
        lease = Lease(
            store,
            self.identity,
            clock=clock,
            interval_s=1.0,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            device="cpu",
        )
        round_observer = RoundObserver(
            store,
            settings,
            lease=lease,
            observer=Observer(store, clock=clock, timeout_s=settings.heartbeat_timeout_s),
            model_hash="bench",
            table=bare_table(sizes),
        )
        self._store = store
        self._clock = clock
        self._exchange = Exchange(
            store,
            settings,
            lease=lease,
            round_observer=round_observer,
            clock=clock,
            check=lambda: None,
        )

    def put_lease(self) -> None:
        beat = Heartbeat(
            replica=self.identity.replica,
            incarnation=self.identity.incarnation,
            count=1,
            interval_s=1.0,
            role=SYNCER if self.is_syncer else REPLICA,
            state="computing",
            round=1,
            step=0,
            tokens=0,
            started_wall_s=0.0,
            wall_s=0.0,
        )
        self._store.put(keys.beat(beat.replica, beat.incarnation), beat.to_bytes())

    def contribute(
        self,
        number: int,
        vector: Tensor,
        timings: Timings | None = None,
        *,
        settles: bool = False,
    ) -> Sent:
        """Put ``vector`` (n,) fp32 and its record."""
        return self._exchange.contribute(
            number,
            base=_base(number),
            model_hash="bench",
            vector=vector,
            work=LocalWork(tokens=1, new_tokens=1, steps=1, rounds=1, loss=1.0, compute_s=1.0),
            rounds_here=number,
            timings=timings or Timings(self._clock),
            settles=settles,
        )

    def settle(self, number: int, sent: Sent | None, timings: Timings | None = None) -> RoundResult:
        return self._exchange.settle(
            number, base=_base(number), sent=sent, timings=timings or Timings(self._clock)
        )

    def round(self, number: int, vector: Tensor | None) -> tuple[RoundResult, Timings]:
        """Contribute ``vector`` (n,) fp32 to the round, unless it is None, and settle it."""
        timings = Timings(self._clock)
        sent = None if vector is None else self.contribute(number, vector, timings, settles=True)
        return self.settle(number, sent, timings), timings


def _base(round: int) -> Base:
    return Base(round=round - 1, digest="bench")


def in_threads(works: Sequence[Callable[[], object]]) -> None:
    """Run all of ``works`` at once, each in a thread; raises what one of them raised."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        barrier.wait()
        work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(run, work) for work in works]:
            done.result()
