"""A group without faults in virtual time, and its requests by purpose.

The replicas are those of :mod:`tests.diloco.model`: the real library on virtual threads. Every
request takes 5 to 100 ms; inner steps take time and no computation.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import torch

from bench.support.noted import NotedRequests
from diloco.group import join
from diloco.protocol import keys
from diloco.protocol.settings import GroupSettings
from diloco.store.base import MissingKey
from tests.diloco.model.faulty_bucket import FaultyView
from tests.diloco.model.harness import NO_FAULTS, Coordinates, Harness, Life, Scenario, virtual
from tests.diloco.model.virtual_time import Process

STEPS = 50
"""Inner steps of a round."""
SLOW = 1.5
"""Time of the straggler's step relative to the others'."""
SPREAD = 0.02
"""Random share by which the times of two steps differ."""
TIMED = ("heartbeats", "awaited", "newer process", "commands", "telemetry")
"""Purposes whose requests follow the clock."""
DATA = ("data", "start")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A group and its rounds. ``warm_up`` rounds come before those that are counted: replicas learn
    how long exchanges take. ``straggler``: the last replica's steps take :data:`SLOW` times as
    long."""

    replicas: int
    straggler: bool = False
    round_s: float = 60.0
    heartbeat_timeout_s: float = 15.0
    warm_up: int = 6
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Control requests per replica and round by (purpose, verb). ``listers`` are the processes
    that have listed contributions, ``seconds`` is the duration of a round, ``log_bytes`` the size
    of the last round's records, plan and commit."""

    requests: dict[tuple[str, str], float]
    listers: frozenset[str]
    seconds: float
    log_bytes: int

    def of(self, *kinds: str) -> float:
        """Return the requests of these purposes; of all if none is named."""
        return sum(n for (kind, _), n in self.requests.items() if not kinds or kind in kinds)

    @property
    def exchange(self) -> float:
        """Requests that do not follow the clock."""
        return self.of() - self.of(*TIMED)


def purpose(verb: str, key: str) -> str:
    """Return what a request is for."""
    if key.startswith(keys.ROUNDS):
        if keys.is_exchanged(key) or (verb == "PUT" and keys.parse_contribution_record(key)):
            return "data"
        name = key.rsplit("/", 1)[-1]
        if name == "awaited":
            return name
        if name in ("plan.json", "commit.json"):
            return name.removesuffix(".json")
        return "records" if name else "listing of the round"
    if key.startswith(keys.MEMBERS):
        if verb == "PUT":
            return "heartbeats" if keys.parse_beat(key) else "start"
        if key == keys.MEMBERS or keys.parse_beat(key):
            return "leases"
        return "newer process"
    if key.startswith(keys.CONTROL):
        return "commands"
    return "telemetry" if key.startswith("telemetry/") else "start"


class CountingView(NotedRequests, FaultyView):
    """A view that counts its process's requests in ``requests`` by purpose and verb."""

    requests: Counter[tuple[str, str]]
    listers: set[str]

    def note(self, verb: str, key: str, *, length: int | None = None) -> None:
        if verb == "LIST" and key.endswith("/contributions/"):
            self.listers.add(self._process.name)
        is_poll = length == 1 and keys.is_exchanged(key)
        self.requests["polls" if is_poll else purpose(verb, key), verb] += 1

    def get_range(self, key: str, start: int, length: int) -> bytes:
        try:
            return super().get_range(key, start, length)
        except MissingKey:
            if keys.is_exchanged(key) and length > 1:
                self.requests["data", "GET"] -= 1
                self.requests["polls", "GET"] += 1
            raise


class CountedGroup(Harness):
    """Runs the group of a :class:`Case` until enough rounds are counted."""

    def __init__(self, case: Case) -> None:
        settings = GroupSettings(
            sync_every=STEPS,
            total_rounds=10_000,
            num_replicas=case.replicas,
            max_replicas=max(64, case.replicas),
            min_quorum=max(1, case.replicas // 2),
            start_replicas=case.replicas,
            reduce_plan="sharded",
            heartbeat_timeout_s=case.heartbeat_timeout_s,
            checkpoint_every=1000,
            state_every=0,
            eval_every=0,
            warmup_steps=0,
        )
        scenario = Scenario(settings=settings, chances=NO_FAULTS, replicas=case.replicas)
        super().__init__(scenario, random.Random(case.seed))
        self.bucket.keeps_past = False
        self.case = case
        self.requests: Counter[tuple[str, str]] = Counter()
        self.listers: set[str] = set()

    def measured(self) -> Measured:
        for replica in range(self.case.replicas):
            self.launch(replica)
        try:
            self._run_until(self.case.warm_up)
            before = self.requests.copy()
            self.listers.clear()
            began_s = self.scheduler.now_s
            self._run_until(self.case.warm_up + self.case.rounds)
            made = self.requests - before
        finally:
            self.scheduler.close()
        shares = self.case.replicas * self.case.rounds
        return Measured(
            requests={name: n / shares for name, n in made.items() if name[0] not in DATA},
            listers=frozenset(self.listers),
            seconds=(self.scheduler.now_s - began_s) / self.case.rounds,
            log_bytes=sum(
                len(data)
                for key, data in self.bucket.objects.items()
                if key.startswith(keys.round_dir(self.case.warm_up + self.case.rounds))
                and key.endswith(".json")
            ),
        )

    def _run_until(self, rounds: int) -> None:
        self.scheduler.run(until=lambda: self.committed() >= rounds, deadline_s=1e9)

    def _view(self, process: Process) -> CountingView:
        view = CountingView(self.bucket, process, self.rng, self.counts, self.chances)
        view.requests, view.listers = self.requests, self.listers
        return view

    def _train(self, life: Life) -> None:
        model = Coordinates(life.replica)
        slow = self.case.straggler and life.replica == self.case.replicas - 1
        step_s = self.case.round_s / STEPS * (SLOW if slow else 1.0)
        with join(
            "memory://model",
            model=model,
            inner_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            replica=life.replica,
            store=self._view(life.process),
            clock=self.scheduler,
        ) as group:
            while not group.done:
                self.scheduler.sleep(step_s * self.rng.uniform(1 - SPREAD, 1 + SPREAD))
                model.count(0)
                group.step(tokens=1, loss=1.0)


def measure(case: Case) -> Measured:
    """Run the group of ``case`` and return its requests; deterministic."""
    torch.set_num_threads(1)
    group = CountedGroup(case)
    with virtual(group):
        return group.measured()
