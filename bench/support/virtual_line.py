"""Exchanges at the end of a line, in virtual time.

The members are those of :mod:`bench.support.exchanging`, on virtual threads
(:mod:`tests.diloco.model.virtual_time`). Requests take the time of a :class:`LineSpec`; computing
takes none. So a result depends on the protocol alone, on any machine and under any load.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.support.exchanging import BareMember, bare_settings
from bench.support.line import LineSpec, LineStore
from bench.support.noted import NotedRequests
from diloco.protocol.parallel_reads import ExpectedReads, read_parts
from diloco.store.transfers import BYTES_IN_FLIGHT, Line
from tests.diloco.model import virtual_time
from tests.diloco.model.virtual_line import LineOfEach
from tests.diloco.model.virtual_time import Process, Scheduler, Waiters


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """``seconds`` of each measured round, from its beginning until all replicas have the mean, and
    ``requests`` of all replicas in it, as (seconds since its beginning, replica, verb, key)."""

    seconds: tuple[float, ...]
    requests: tuple[tuple[tuple[float, int, str, str], ...], ...]


class TracedStore(NotedRequests, LineStore):
    """A line that records its requests."""

    def __init__(self, *given: Any, replica: int, **more: Any) -> None:
        super().__init__(*given, **more)
        self.requests: list[tuple[float, int, str, str]] = []
        self._replica = replica

    def note(self, verb: str, key: str, *, length: int | None = None) -> None:
        self.requests.append((self._clock.monotonic(), self._replica, verb, key))


@contextlib.contextmanager
def virtual(budget_bytes: int) -> Iterator[Scheduler]:
    """Run exchanges on virtual threads; a replica has ``budget_bytes`` for parts that it reads."""
    scheduler = Scheduler(random.Random(0))
    line = LineOfEach(scheduler, budget_bytes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(virtual_time.activated(scheduler))
        for name, value in (
            ("exchange.round_exchange.call_in_daemon", virtual_time.call_in_daemon),
            ("protocol.parallel_reads.DaemonPool", virtual_time.ThreadPoolExecutor),
            ("exchange.reduce.DaemonPool", virtual_time.ThreadPoolExecutor),
            ("exchange.reduce.wait", virtual_time.wait),
        ):
            stack.enter_context(mock.patch(f"diloco.{name}", value))
        for reads in (read_parts, ExpectedReads.__init__):
            stack.enter_context(mock.patch.dict(reads.__kwdefaults__, line=line))
        try:
            yield scheduler
        finally:
            scheduler.close()


def exchange(
    line: LineSpec,
    root: Path,
    *,
    replicas: int,
    plan: str,
    numel: int,
    rounds: int,
    warm: int,
    budget_bytes: int = BYTES_IN_FLIGHT,
) -> Exchanged:
    """Run ``warm`` rounds, and then ``rounds`` that are measured; all replicas begin at once."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    settings = bare_settings(replicas=replicas, plan=plan)
    with virtual(budget_bytes) as scheduler:
        arrived: dict[int, int] = {}
        waiting: Waiters = set()
        stores = []

        def train(number: int) -> None:
            store = TracedStore(
                root, line, clock=scheduler, uploads=Line(clock=scheduler), replica=number
            )
            stores.append(store)
            member = BareMember(store, number, settings, [numel], clock=scheduler)
            member.put_lease()
            vector = torch.randn(numel, generator=torch.Generator().manual_seed(number))
            for round in range(1, warm + rounds + 1):
                arrived[round] = arrived.get(round, 0) + 1
                if arrived[round] == replicas:
                    scheduler.changed(waiting)
                else:
                    scheduler.block(lambda round=round: arrived[round] == replicas, on=[waiting])
                starts.setdefault(round, scheduler.monotonic())
                member.round(round, vector)
                ends[round] = scheduler.monotonic()

        tasks = [
            scheduler.spawn(f"replica {n}", lambda n=n: train(n), Process(f"replica {n}"))
            for n in range(replicas)
        ]
        scheduler.run(until=lambda: all(task.done for task in tasks), deadline_s=1e9)
    measured = range(warm + 1, warm + rounds + 1)
    every = sorted(request for store in stores for request in store.requests)
    return Exchanged(
        seconds=tuple(ends[round] - starts[round] for round in measured),
        requests=tuple(
            tuple(
                (at_s - starts[round], *rest)
                for at_s, *rest in every
                if starts[round] <= at_s <= ends[round]
            )
            for round in measured
        ),
    )


def transfer_s(line: LineSpec, *, up: int, down: int, part_bytes: int) -> float:
    """Return the seconds of the best raw transfer: parts up, then parts down, at the full rate of
    the line, each direction a latency late."""

    def direction(size_bytes: int) -> float:
        last = min(part_bytes, size_bytes)
        slowest = max(size_bytes / line.total, last / line.connection)
        return line.latency_s + slowest

    return direction(up) + direction(down)
