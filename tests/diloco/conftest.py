"""A group in one process: replicas are threads that train a tiny model on a local store."""

from __future__ import annotations

import contextlib
import fnmatch
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from diloco.exchange.reduce import Reduction
from diloco.exchange.timings import Timings
from diloco.group import Group, join
from diloco.init import create_group
from diloco.model.buffers import Buffers
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.records import CheckpointManifest, Commit, ContributionRecord, Plan
from diloco.protocol.settings import GroupSettings
from diloco.store.base import (
    LISTED,
    Data,
    LocalStore,
    MakeParts,
    MissingKey,
    ObjectInfo,
    Pages,
    Store,
)
from diloco.syncer import Syncer
from diloco.training.checkpoint import load_checkpoint
from diloco.training.sample import Sampler
from tests.diloco.clocks import FastClock
from tests.diloco.faulty_store import Faults, FaultyStore
from tests.servers import wait_until


class Killed(BaseException):
    """Raised in the thread of a replica that is "killed"; no handler of the library catches it."""


@dataclass
class Trap:
    """Kills the replica at its ``nth`` ``operation`` on a key that matches ``pattern``."""

    operation: str
    pattern: str
    when: str = "before"
    nth: int = 1


class MortalStore:
    """A store of a killed replica: after the trap, all operations of all threads raise Killed."""

    def __init__(self, inner: Store, trap: Trap | None) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.atomic_create = inner.atomic_create
        self.dead = False
        self._trap = trap
        self._hits = 0
        self._spoilt: tuple[str, str] | None = None
        self.spoil_reads: Callable[[str, bytes], bytes] = lambda key, data: data
        """Changes the result of a read; the object is unchanged."""
        self._garbled = ""

    def garble(self, pattern: str) -> None:
        """Damage this replica's reads of keys that match ``pattern``, not the objects."""
        self._garbled = pattern

    def spoil(self, pattern: str, damage: str) -> None:
        """Damage the objects written to keys that match ``pattern``."""
        self._spoilt = (pattern, damage)

    def _alive(self, operation: str, key: str, when: str) -> None:
        trap = self._trap
        armed = trap is not None and (operation, when) == (trap.operation, trap.when)
        if trap and armed and fnmatch.fnmatch(key, trap.pattern):
            self._hits += 1
            self.dead = self.dead or self._hits == trap.nth
        if self.dead:
            raise Killed

    def put(self, key: str, data: Data) -> None:
        self._alive("put", key, "before")
        self._put(key, bytes(data))
        self._alive("put", key, "after")

    def _put(self, key: str, data: bytes) -> None:
        if self._spoilt is None or not fnmatch.fnmatch(key, self._spoilt[0]):
            self.inner.put(key, data)
        elif self._spoilt[1] == "corrupt":
            self.inner.put(key, data[:-3] + b"\xff" + data[-2:])
        elif self._spoilt[1] == "truncated":
            self.inner.put(key, data[:-3])

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        """Counts as one put for traps and damage."""
        self._alive("put", key, "before")
        if self._spoilt is None or not fnmatch.fnmatch(key, self._spoilt[0]):
            self.inner.put_stream(key, make_parts, size_bytes=size_bytes)
        else:
            self._put(key, b"".join(make_parts()))
        self._alive("put", key, "after")

    def create(self, key: str, data: Data) -> bool:
        self._alive("create", key, "before")
        created = self.inner.create(key, data)
        self._alive("create", key, "after")
        return created

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self._alive("get", key, "before")
        return self.spoil_reads(key, self.inner.get(key, limit=limit))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._alive("get", key, "before")
        data = self.spoil_reads(key, self.inner.get_range(key, start, length))
        if fnmatch.fnmatch(key, self._garbled):
            data = bytes([data[0] ^ 0x40]) + data[1:]
        return data

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        self._alive("list", prefix, "before")
        return self.inner.list(prefix, limit=limit)

    def list_pages(self, prefix: str) -> Pages:
        self._alive("list", prefix, "before")
        return self.inner.list_pages(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._alive("delete", "", "before")
        self.inner.delete(keys)


def batch_loss(model: nn.Module, replica: int, step: int) -> torch.Tensor:
    """The loss of a replica's step: least squares on its own data."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(8, 4, generator=generator)
    loss: torch.Tensor = (model(x) - x[:, :2]).square().mean()
    return loss


@dataclass
class Member:
    """One replica: its thread and its result."""

    replica: int
    store: MortalStore
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    steps: int = 0
    reason: str = ""
    error: BaseException | None = None
    group: Group | None = None
    thread: threading.Thread = field(init=False)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class TinyGroup:
    """Creates a group and runs its replicas."""

    trap = Trap
    batch_loss = staticmethod(batch_loss)

    def __init__(self, root: Path, **settings: object) -> None:
        self.root = root
        self.store = LocalStore(root)
        chosen: dict[str, object] = {
            "sync_every": 3,
            "total_rounds": 4,
            "num_replicas": 3,
            "warmup_steps": 0,
            "heartbeat_timeout_s": 3600.0,
            "round_timeout_s": 7200.0,
            "start_wait_s": 3000.0,
            "grace_s": 3000.0,
            "checkpoint_every": 2,
            "eval_every": 0,
            "state_every": 0,
            **settings,
        }
        self.settings = GroupSettings(**chosen)  # type: ignore[arg-type]
        create_group(str(root), self.settings)
        self.members: list[Member] = []
        self.syncers: list[threading.Thread] = []

    def start(
        self,
        replica: int,
        *,
        trap: Trap | None = None,
        spoil: tuple[str, str] | None = None,
        spoil_reads: Callable[[str, bytes], bytes] | None = None,
        garble: str = "",
        faults: Faults | None = None,
        atomic_create: bool = True,
        make_model: Callable[[], nn.Module] = lambda: nn.Linear(4, 2),
        loss: Callable[[nn.Module, int, int], torch.Tensor] = batch_loss,
        lr: float = 0.05,
        momentum: float = 0.0,
        sample: Sampler | None = None,
        buffers: Buffers | None = None,
        on_step: Callable[[Member, Group], None] = lambda member, group: None,
    ) -> Member:
        torch.manual_seed(100 + replica)  # every replica starts from different weights
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        store: Store = self.store
        if faults is not None:
            rng = random.Random(f"{replica} {len(self.members)}")
            store = FaultyStore(store, rng=rng, clock=FastClock(), faults=faults)
        member = Member(replica, MortalStore(store, trap), model, optimizer, loss)
        member.store.atomic_create = atomic_create
        if spoil:
            member.store.spoil(*spoil)
        member.store.garble(garble)
        if spoil_reads is not None:
            member.store.spoil_reads = spoil_reads
        member.thread = threading.Thread(
            target=self._train, args=(member, on_step, sample, buffers), daemon=True
        )
        self.members.append(member)
        member.thread.start()
        return member

    def _train(
        self,
        member: Member,
        on_step: Callable[[Member, Group], None],
        sample: Sampler | None,
        buffers: Buffers | None,
    ) -> None:
        optimizer = member.optimizer
        try:
            with join(
                str(self.root),
                model=member.model,
                inner_optimizer=optimizer,
                replica=member.replica,
                store=member.store,
                sample=sample,
                buffers=buffers,
                heartbeat_interval_s=0.02,
                telemetry_interval_s=0.05,
                clock=FastClock(),
            ) as group:
                member.group = group
                while not group.done:
                    loss = member.loss(member.model, member.replica, group.data_step)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    member.steps += 1
                    on_step(member, group)
                    group.step(tokens=8, loss=loss)
            member.reason = group.reason
        except BaseException as error:
            member.error = error

    def start_syncer(self, *, trap: Trap | None = None) -> Syncer:
        """Run a syncer in a thread; a killed one raises nothing."""
        syncer = Syncer(MortalStore(self.store, trap), clock=FastClock(), heartbeat_interval_s=0.02)

        def serve() -> None:
            with contextlib.suppress(Killed):
                syncer.run()

        thread = threading.Thread(target=serve, daemon=True)
        self.syncers.append(thread)
        thread.start()
        member = keys.member(self.settings.max_replicas)
        wait_until(
            lambda: any(keys.parse_beat(info.key) for info in self.store.list(member)),
            "the syncer's heartbeat",
        )
        return syncer

    def wait(self, *members: Member, seconds: float = 600.0) -> None:
        """Join threads; a replica that hangs fails the test."""
        for member in members or self.members:
            member.thread.join(seconds)
            assert not member.thread.is_alive(), f"replica {member.replica} hangs"

    def commits(self) -> list[Commit]:
        result: list[Commit] = []
        while True:
            try:
                data = self.store.get(f"rounds/{len(result) + 1:08d}/commit.json")
            except MissingKey:
                return result
            result.append(Commit.from_bytes(data))

    def plan(self, round: int) -> Plan:
        return Plan.from_bytes(self.store.get(f"rounds/{round:08d}/plan.json"))

    def replayed(self, *, start: int = 0) -> torch.Tensor:
        """Compute the global weights from checkpoint ``start`` and every later committed round in
        order (I3)."""
        settings = self.settings
        layout = Layout(
            self.members[0].model,
            fragments=settings.num_fragments,
            pattern=settings.fragment_pattern,
        )
        outer = OuterOptimizer(
            lr=settings.outer_lr, momentum=settings.outer_momentum, numel=layout.numel
        )
        manifest = CheckpointManifest.from_bytes(self.store.get(keys.checkpoint_manifest(start)))
        weights = load_checkpoint(self.store, manifest, layout, outer).weights
        for commit in self.commits()[start:]:
            if commit.void:
                continue
            slots = layout.table.slots_of(commit.fragment)
            plan = self.plan(commit.round)
            reduction = Reduction(self.store, settings, plan, slots, timings=Timings(FastClock()))
            merged = reduction.committed(commit)
            assert merged.digest == commit.merged_digest
            outer.step(weights, merged.vector, layout.span(commit.fragment))
        tensors = layout.split(weights)  # fragments are contiguous; replicas return model order
        return torch.cat([tensors[tensor.name].flatten() for tensor in layout.tensors])

    def assert_log(self) -> list[Commit]:
        """Check that no round or contributor is missing or duplicated, and every base correct."""
        commits = self.commits()
        committed, tokens, base_of = 0, 0, dict[int, int]()
        for number, commit in enumerate(commits, start=1):
            plan = self.plan(number)
            fragment = (number - 1) % self.settings.num_fragments
            assert (commit.round, plan.round) == (number, number)
            assert (commit.fragment, plan.fragment) == (fragment, fragment)
            members = [c.replica for c in plan.contributions]
            assert members == sorted(set(members)) == [c.replica for c in commit.contributors]
            for c in plan.contributions:
                key = keys.contribution_record(number, c.replica, c.incarnation)
                record = ContributionRecord.from_bytes(self.store.get(key))
                assert record.base_round == base_of.get(fragment, 0)
            if not commit.void:
                committed += 1
                tokens += sum(c.new_tokens for c in plan.contributions)
                base_of[fragment] = number
            assert (commit.committed_total, commit.tokens_total) == (committed, tokens)
            assert commit.last == (number == len(commits))
        return commits

    def assert_agreed(self, *members: Member) -> None:
        """All replicas ended without an error, with equal bits, and applied the same log."""
        for member in members:
            assert member.error is None, repr(member.error)
        first = members[0].weights()
        assert all(torch.equal(member.weights(), first) for member in members[1:])


@pytest.fixture
def tiny_group(tmp_path: Path) -> Callable[..., TinyGroup]:
    return lambda **settings: TinyGroup(tmp_path / "run", **settings)


@pytest.fixture
def make_groups(tmp_path: Path) -> Callable[..., TinyGroup]:
    """Several groups in one test, with different names."""
    return lambda name, **settings: TinyGroup(tmp_path / name, **settings)


@pytest.fixture
def tiny_group_class() -> type[TinyGroup]:
    """For tests that create their groups themselves."""
    return TinyGroup
