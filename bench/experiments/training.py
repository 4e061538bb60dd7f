"""Trains one arm on real text and evaluates the *global* weights on held-out text.

Text: the standard library's sources, as in the demo (:mod:`diloco.workloads.text`). Model: the
byte-level GPT of the library in a smaller size.

A *group* arm is the library itself: one thread per replica joins through :func:`diloco.join` over a
folder, so payloads, plans, commits, codecs, rebasing and joining are those that a run uses. Threads
take their inner steps one at a time, and no clock decides who is in a round, so a result depends on
(arm, seed) alone; :func:`train` checks that every round had the contributors it should have had.

A *plain* arm is an AdamW loop. Data parallel is that loop with a larger batch: the mean gradient
over four replicas of eight sequences is the gradient over thirty-two.

Left out: GPUs, real networks, more than one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench.experiments.arms import BATCH, CONTEXT, EVALUATIONS, GROUP, Arm, dropped
from bench.support.segments import every_segment
from diloco.group import Group, join
from diloco.init import create_group
from diloco.model.inner_state import optimizers_of
from diloco.protocol import keys
from diloco.protocol.records import Commit, ContributionRecord, Heartbeat, Plan
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Segment
from diloco.protocol.workload import STDLIB, ByteGPTWorkload, GPTSize
from diloco.store.base import Data, LocalStore, MissingKey, Store
from diloco.workloads.byte_gpt import ByteGPTTraining
from diloco.workloads.sharded import RandomWindows
from diloco.workloads.text import Corpus, load_corpus

TEXT = STDLIB
EVAL_BYTES = 131_072


@dataclass(frozen=True, kw_only=True)
class SmallGPT(ByteGPTWorkload):
    """The built-in workload in a size that trains on millions of bytes in a minute of one core."""

    eval_bytes: int = EVAL_BYTES
    layers: int = 2
    width: int = 64

    @property
    def shape(self) -> GPTSize:
        return GPTSize(layers=self.layers, width=self.width, heads=2, context=CONTEXT)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``curve``: (tokens so far, held-out loss in nats per byte). ``lost`` of ``contributions``
    were dropped. ``payload_bytes`` is the size of all payloads that were averaged."""

    curve: tuple[tuple[int, float], ...]
    contributions: int = 0
    lost: int = 0
    payload_bytes: int = 0

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


class FastClock:
    """Runs twenty times as fast as the wall, so that polling costs an experiment little."""

    speed = 20.0

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic() * self.speed

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / self.speed)


class LossyStore:
    """Loses a member's contributions to some rounds on their way.

    The record arrives with no tokens, which counts neither for quorum nor merge. The round is
    committed without the member, which is late, exactly as if nothing had arrived, only that no
    replica waits for a grace window to pass. A member that is cut off writes neither record nor
    heartbeats in these rounds.
    """

    def __init__(self, inner: Store, *, arm: Arm, seed: int) -> None:
        self._inner = inner
        self.uri = inner.uri
        self._arm = arm
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, data: Data) -> None:
        parsed = keys.parse_contribution_record(key)
        if self._arm.cut_off and keys.parse_beat(key):
            beat = Heartbeat.from_bytes(bytes(data))
            if beat.state != "syncing" and self._loses(beat.round, beat.replica):
                return
        if parsed and self._loses(*parsed[:2]):
            if self._arm.cut_off:
                return
            record = ContributionRecord.from_bytes(bytes(data))
            data = dataclasses.replace(record, tokens=0).to_bytes()
        self._inner.put(key, data)

    def _loses(self, round: int, replica: int) -> bool:
        if not 0 < round <= len(self._arm.members):
            return False
        return replica not in expected_contributors(self._arm, self._seed, round)


def expected_contributors(arm: Arm, seed: int, round: int) -> frozenset[int]:
    """Return the replicas averaged in ``round`` (counted from 1)."""
    all_replicas = frozenset(range(arm.members[round - 1]))
    return all_replicas - dropped(arm, round=round, seed=seed) if arm.loses else all_replicas


@cache
def _corpus(shard: int, shards: int) -> Corpus:
    return load_corpus(TEXT, shard=shard, shards=shards, context=CONTEXT, eval_bytes=EVAL_BYTES)


def workload_of(settings: GroupSettings, replica: int) -> ByteGPTTraining:
    corpus = _corpus(replica, settings.max_replicas)
    train = RandomWindows(corpus.train, settings, replica=replica, context=CONTEXT)
    return ByteGPTTraining(SmallGPT(), settings, train, corpus.held_out, device=torch.device("cpu"))


def one_step(
    workload: ByteGPTTraining,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    data_step: int,
    schedule_step: int,
    clip: float,
) -> tuple[int, torch.Tensor]:
    """One inner step as :mod:`diloco.replica` takes it; (tokens, loss)."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = workload.lr_at(schedule_step)
    batch = workload.train_batch(data_step)
    loss = workload.loss(model, batch)
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
    return workload.tokens(batch), loss.detach()


def train(arm: Arm, *, seed: int) -> Outcome:
    """Train ``arm`` from ``seed``. Raises if a round deviates from the arm."""
    settings = GroupSettings(**arm.group_settings(seed))
    if arm.kind != GROUP:
        return _train_plain(arm, settings)
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        members = _Members(arm, settings, Path(folder), seed=seed)
        members.run()
        return members.outcome()


def _train_plain(arm: Arm, settings: GroupSettings) -> Outcome:
    workload = workload_of(settings, 0)
    model = workload.build_model()
    optimizers = optimizers_of(workload.inner_optimizer(model))
    tokens, curve = 0, []
    for step in range(arm.total_steps):
        counted, _ = one_step(
            workload,
            model,
            optimizers,
            data_step=step,
            schedule_step=step,
            clip=settings.grad_clip,
        )
        tokens += counted
        if (step + 1) % (arm.total_steps // EVALUATIONS) == 0:
            curve.append((tokens, workload.evaluate(model).loss))
    return Outcome(curve=tuple(curve))


class _Members:
    """The replicas of one run: threads that join and leave at the rounds of the arm."""

    def __init__(self, arm: Arm, settings: GroupSettings, folder: Path, *, seed: int) -> None:
        self._arm = arm
        self._settings = settings
        self._seed = seed
        self._store = LocalStore(folder)
        self._uri = str(folder)
        self._one_at_a_time = threading.Lock()
        self._changed = threading.Condition()
        self._threads: dict[int, threading.Thread] = {}
        self._joined: set[int] = set()
        self._errors: list[BaseException] = []
        create_group(self._uri, settings)

    def run(self) -> None:
        with self._changed:
            self._start(self._arm.members[0])
        while True:
            with self._changed:
                threads = list(self._threads.values())
            for thread in threads:
                thread.join()
            with self._changed:
                if len(threads) == len(self._threads):
                    break
        if self._errors:
            raise self._errors[0]

    def _start(self, replicas: int) -> None:
        for replica in set(range(replicas)) - set(self._threads):
            thread = threading.Thread(target=self._member, args=(replica,), daemon=True)
            self._threads[replica] = thread
            thread.start()

    def _member(self, replica: int) -> None:
        try:
            self._train(replica)
        except BaseException as error:
            with self._changed:
                self._errors.append(error)
                self._changed.notify_all()

    def _train(self, replica: int) -> None:
        workload = workload_of(self._settings, replica)
        model = workload.build_model()
        optimizers = optimizers_of(workload.inner_optimizer(model))
        with join(
            self._uri,
            model=model,
            inner_optimizer=optimizers,
            replica=replica,
            evaluate=lambda: workload.evaluate(model),
            heartbeat_interval_s=0.25,
            store=LossyStore(self._store, arm=self._arm, seed=self._seed),
            clock=FastClock(),
        ) as group:
            self._seen_by_all(replica)
            with self._changed:
                self._joined.add(replica)
                self._changed.notify_all()
            round = 0
            while not group.done:
                if group.round != round:
                    round = group.round
                    if not self._takes_part(replica, round):
                        return  # leaves
                    self._meet(round, group)
                with self._one_at_a_time:
                    tokens, loss = one_step(
                        workload,
                        model,
                        optimizers,
                        data_step=group.data_step,
                        schedule_step=group.schedule_step,
                        clip=self._settings.grad_clip,
                    )
                group.step(tokens=tokens, loss=loss)

    def _takes_part(self, replica: int, round: int) -> bool:
        """With overlap a replica already works towards a round after the last one."""
        members = self._arm.members
        return replica < members[min(round, len(members)) - 1]

    def _seen_by_all(self, replica: int) -> None:
        """Wait until the replica's lease reports training: no round waits for a joining replica."""
        while True:
            for info in self._store.list(keys.member(replica)):
                if keys.parse_beat(info.key) is None:
                    continue
                if Heartbeat.from_bytes(self._store.get(info.key)).state != "syncing":
                    return
            time.sleep(0.02)

    def _meet(self, round: int, group: Group) -> None:
        """Wait until all replicas of ``round`` have joined."""
        replicas = self._arm.members[min(round, len(self._arm.members)) - 1]
        with self._changed:
            self._start(replicas)
            while not self._joined >= set(range(replicas)):
                if self._errors:
                    raise RuntimeError("another member has failed")
                self._changed.wait()

    # -- what came of it -------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        commits = self._commits()
        if len(commits) != len(self._arm.members):
            raise RuntimeError(f"expected {len(self._arm.members)} rounds, found {len(commits)}")
        lost = 0
        for commit in commits:
            found = frozenset(c.replica for c in commit.contributors)
            expected = expected_contributors(self._arm, self._seed, commit.round)
            if found != expected or commit.void:
                raise RuntimeError(
                    f"round {commit.round}: expected contributors {sorted(expected)}, "
                    f"found {sorted(found)} {commit.void}"
                )
            lost += self._arm.members[commit.round - 1] - len(found)
        plans = [Plan.from_bytes(self._store.get(keys.plan(c.round))) for c in commits]
        for plan in plans:
            self._check_late(plan)
        trained = [
            sum(self._arm.members[:n]) * self._arm.steps_per_round * BATCH * CONTEXT
            for n in range(len(commits) + 1)
        ]
        curve = sorted((trained[e.round], e.loss) for s in self._segments() for e in s.evaluations)
        return Outcome(
            curve=tuple(curve),
            contributions=sum(self._arm.members),
            lost=lost,
            payload_bytes=sum(c.size_bytes for plan in plans for c in plan.contributions),
        )

    def _check_late(self, plan: Plan) -> None:
        """Raise unless the plan names all live replicas whose contribution was lost. One that is
        cut off can be named until its lease has expired; it gets no room in any case."""
        lost: frozenset[int] = frozenset()
        if self._arm.late_keep > 0:
            taken = expected_contributors(self._arm, self._seed, plan.round)
            lost = frozenset(range(self._arm.members[plan.round - 1])) - taken
        found = frozenset(late.replica for late in plan.late)
        if found != lost and not (self._can_be_dead(plan.round) and found < lost):
            raise RuntimeError(
                f"round {plan.round}: expected late replicas {sorted(lost)}, found {sorted(found)}"
            )

    def _can_be_dead(self, round: int) -> bool:
        """Return whether the lease of a member that is cut off can have expired."""
        outage = self._arm.outage
        return self._arm.cut_off and outage is not None and outage[1] < round <= outage[2]

    def _commits(self) -> list[Commit]:
        found: list[Commit] = []
        with contextlib.suppress(MissingKey):
            while True:
                found.append(Commit.from_bytes(self._store.get(keys.commit(len(found) + 1))))
        return found

    def _segments(self) -> Iterable[Segment]:
        return map(Segment.from_bytes, every_segment(self._store))
