"""One run in virtual time: replicas, a syncer, their launcher, and the faults.

Every inner step adds one to a separate coordinate, so that the decoded contributions show which
steps they contain (:mod:`tests.diloco.model.oracle`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from diloco.errors import ReplicaError
from diloco.group import Group, join
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.parallel_reads import ExpectedReads, read_parts
from diloco.protocol.records import Command, Commit
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store, StoreError
from diloco.syncer import Syncer
from diloco.training.sweep import sweep
from tests.diloco.model import oracle, virtual_time
from tests.diloco.model.faulty_bucket import Bucket, Chances, FaultyView
from tests.diloco.model.virtual_line import LineOfEach
from tests.diloco.model.virtual_time import Process, Scheduler

COORDINATES = 2048
TENSORS = 4
NO_FAULTS = Chances()
ALL_DENIED = Chances(deny=1.0)
CALM_S = 4 * 3600.0
"""After the last fault a run must have ended within this."""


class Coordinates(nn.Module):
    """Four tensors of 512 values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.parts = nn.ParameterList(
            torch.randn(COORDINATES // TENSORS, generator=generator) for _ in range(TENSORS)
        )

    @torch.no_grad()
    def count(self, step: int) -> None:
        """Make one inner step. It changes nothing once all coordinates are used."""
        if step < COORDINATES:
            self.parts[step % TENSORS][step // TENSORS] += 1.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The configuration of a run, and its faults until ``faults_until_s``."""

    settings: GroupSettings
    chances: Chances
    replicas: int
    spares: int = 0
    syncer: bool = False
    large_shards: bool = False
    """Whether each owner has two shards."""
    drains: float = 0.0
    kills: int = 6
    step_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of an inner step by replica; drawn for all others."""
    denied_s: tuple[float, float] = (0.0, 0.0)
    """From when until when the bucket denies everything."""
    faults_until_s: float = 1500.0


@dataclass
class Life:
    """One process of a replica."""

    replica: int
    process: Process
    started_s: float
    group: Group | None = None
    model: Coordinates | None = None
    reason: str = ""
    error: BaseException | None = None
    over: bool = False
    steps: list[int] = field(default_factory=list)
    ended_s: float = float("inf")

    @property
    def ended(self) -> bool:
        return self.over or self.process.dead


class Harness:
    """Runs a scenario to its end; the oracle then reads the bucket."""

    def __init__(self, scenario: Scenario, rng: random.Random) -> None:
        self.scenario = scenario
        self.settings = scenario.settings
        self.rng = rng
        self.scheduler = Scheduler(rng)
        self.bucket = Bucket(self.scheduler)
        self.bucket.keeps_past = scenario.chances.stale > 0
        self.counts: Counter[str] = Counter()
        self.lives: list[Life] = []
        self.steps = 0
        self.calm_from_s: float | None = None
        self.swept_s = 0.0
        """When the last sweep at the end of the run that succeeded began."""
        document = GroupDocument(
            run_id="0" * 16, name="model", settings=scenario.settings, workload={"kind": "caller"}
        )
        self.bucket.put(keys.GROUP, document.to_bytes())

    # -- faults ----------------------------------------------------------------------------------

    def chances(self) -> Chances:
        if self.denied_between(self.scheduler.now_s, self.scheduler.now_s):
            return ALL_DENIED
        return NO_FAULTS if self.calm else self.scenario.chances

    def denied_between(self, from_s: float, until_s: float) -> bool:
        """Return whether the bucket denied a request in that time."""
        begin_s, end_s = self.scenario.denied_s
        return begin_s < end_s and from_s < 1000 + end_s and until_s >= 1000 + begin_s

    def sweep(self, store: Store, **how: Any) -> int:
        """The library's sweep, with its time recorded."""
        began_s = self.scheduler.now_s
        deleted = sweep(store, **how)
        self.swept_s = max(self.swept_s, began_s)
        return deleted

    @property
    def calm(self) -> bool:
        if self.calm_from_s is None:
            near_end = self.committed() > self.settings.total_rounds - 3
            if near_end or self.scheduler.now_s > 1000 + self.scenario.faults_until_s:
                self.calm_from_s = self.scheduler.now_s
        return self.calm_from_s is not None

    def plan(self, round: int) -> dict[str, Any]:
        """Return the plan of a round."""
        plan: dict[str, Any] = json.loads(self.bucket.written[keys.plan(round)])
        return plan

    def committed(self) -> int:
        return self.bucket.commits

    # -- processes -------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end. Raises :class:`~tests.diloco.model.virtual_time.Hang` if it does not
        end."""
        for replica in range(self.scenario.replicas + self.scenario.spares):
            self.launch(replica)
        if self.scenario.syncer:
            self.launch_syncer()
        self.scheduler.spawn("launcher", self._look_after, Process("launcher"))
        try:
            self.scheduler.run(until=self.over, deadline_s=1000 + 1500 + CALM_S)
        finally:
            self.scheduler.close()

    def over(self) -> bool:
        """Return whether the result exists, no process runs and no write is pending."""
        return (
            keys.FINAL_MANIFEST in self.bucket.objects
            and all(life.ended for life in self.lives)
            and not self.scheduler.works_for(self.bucket.network)
        )

    def _view(self, process: Process) -> FaultyView:
        deathless = replace(self.scenario.chances, kill=0.0)

        def chances() -> Chances:
            chosen = self.chances()
            too_many = self.counts["kill"] >= self.scenario.kills
            return deathless if too_many and chosen is self.scenario.chances else chosen

        return FaultyView(self.bucket, process, self.rng, self.counts, chances)

    def launch(self, replica: int) -> None:
        life = Life(replica, Process(f"replica {replica}"), self.scheduler.now_s)
        self.lives.append(life)
        self.scheduler.spawn(f"replica {replica}", lambda: self._train(life), life.process)

    def _train(self, life: Life) -> None:
        model = life.model = Coordinates(life.replica)
        step_s = self.rng.uniform(0.2, 2.0)
        step_s = self.scenario.step_s.get(life.replica, step_s)
        try:
            with join(
                "memory://model",
                model=model,
                inner_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                replica=life.replica,
                telemetry_interval_s=30.0,
                store=self._view(life.process),
                clock=self.scheduler,
            ) as group:
                life.group = group
                while not group.done:
                    self.scheduler.sleep(step_s)
                    model.count(self.steps)
                    life.steps.append(self.steps)
                    self.steps += 1
                    group.step(tokens=1, loss=1.0)
            life.reason = group.reason
        except Exception as error:
            life.error = error
        life.over, life.ended_s = True, self.scheduler.now_s

    def launch_syncer(self) -> None:
        process = Process("syncer")
        life = Life(self.settings.max_replicas, process, self.scheduler.now_s)
        self.lives.append(life)

        def serve() -> None:
            try:
                syncer = Syncer(self._view(process), clock=self.scheduler)
                syncer.run()
                life.reason = "left" if syncer.left else "completed"
            except Exception as error:
                life.error = error
            life.over, life.ended_s = True, self.scheduler.now_s

        self.scheduler.spawn("syncer", serve, process)

    def _look_after(self) -> None:
        """Launch replicas again that have died or failed; sometimes drain one."""
        while True:
            self.scheduler.sleep(self.rng.uniform(2, 20))
            newest = {life.replica: life for life in self.lives}
            for replica, life in newest.items():
                if life.ended and life.reason in ("", "left"):
                    away = self.rng.random() < (0.2 if self.calm else 0.9)
                    if away:
                        continue
                    if replica == self.settings.max_replicas:
                        self.launch_syncer()
                    else:
                        self.launch(replica)
                elif not self.calm and life.group and self.rng.random() < self.scenario.drains:
                    self.counts["drain"] += 1
                    life.group.leave(within_s=self.rng.choice([0.0, 5.0, 60.0]), reason="drained")


class QuietUsage:
    """Replaces the measurement of the process's machine usage."""

    def __init__(self, clock: object) -> None:
        pass

    def read(self) -> dict[str, float]:
        return {}


@contextlib.contextmanager
def virtual(harness: Harness) -> Iterator[None]:
    """Run the library on the virtual threads, time and randomness of ``harness``."""
    secrets = SimpleNamespace(
        token_hex=lambda n: f"{harness.rng.getrandbits(8 * n):0{2 * n}x}",
        randbits=harness.rng.getrandbits,
    )
    large_parts = 1 if harness.scenario.large_shards else 8
    patches: dict[str, Any] = {
        "diloco.membership.free_number.secrets": secrets,
        "diloco.membership.lease.threading": virtual_time.threading,
        "diloco.membership.observer.threading": virtual_time.threading,
        "diloco.telemetry.writer.threading": virtual_time.threading,
        "diloco.telemetry.writer.Usage": QuietUsage,
        "diloco.syncer.threading": virtual_time.threading,
        "diloco.exchange.inflight_rounds.DaemonPool": virtual_time.ThreadPoolExecutor,
        "diloco.exchange.inflight_rounds.wait": virtual_time.wait,
        "diloco.exchange.round_exchange.call_in_daemon": virtual_time.call_in_daemon,
        "diloco.training.background.call_in_daemon": virtual_time.call_in_daemon,
        "diloco.training.background.wait": virtual_time.wait,
        "diloco.protocol.parallel_reads.DaemonPool": virtual_time.ThreadPoolExecutor,
        "diloco.exchange.reduce.DaemonPool": virtual_time.ThreadPoolExecutor,
        "diloco.exchange.reduce.wait": virtual_time.wait,
        "diloco.training.final_export.sweep": harness.sweep,
        "diloco.training.group.call_in_daemon": virtual_time.call_in_daemon,
        "diloco.training.group.wait": virtual_time.wait,
        "diloco.training.partial_round.call_in_daemon": virtual_time.call_in_daemon,
        "diloco.training.partial_round.wait": virtual_time.wait,
        "diloco.training.group.SystemClock": lambda: harness.scheduler,
        "diloco.training.group.secrets": secrets,
        "diloco.syncer.SystemClock": lambda: harness.scheduler,
        "diloco.syncer.secrets": secrets,
        "diloco.protocol.blocks.SMALLEST_BLOCK": 256,
        "diloco.protocol.reduce_cost.LARGE_SHARD_PARTS": large_parts,
        "diloco.protocol.packed_rounds.BLOCK": 2,
        "diloco.protocol.round_weights.MOST_AWAY": oracle.MOST_AWAY,
        "diloco.protocol.round_weights.STEADY_ROUNDS": oracle.STEADY_ROUNDS,
        "diloco.training.round_packs.BLOCK": 2,
    }
    logger = logging.getLogger("diloco")
    level, handlers = logger.level, logger.handlers[:]
    with contextlib.ExitStack() as stack:
        stack.enter_context(virtual_time.activated(harness.scheduler))
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value))
        line = LineOfEach(harness.scheduler)
        for reads in (read_parts, ExpectedReads.__init__):
            stack.enter_context(mock.patch.dict(reads.__kwdefaults__, line=line))
        if level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)
            # A killed process leaves its handler, whose lock works during the run alone.
            logger.handlers[:] = handlers


__all__ = ["Command", "Commit", "Harness", "ReplicaError", "Scenario", "StoreError", "virtual"]
