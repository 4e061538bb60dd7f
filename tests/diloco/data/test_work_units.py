"""Work units: each sample of an epoch is in the weights exactly once, whatever happens to replicas.

The model keeps its own account: a process has the samples of its local progress, a contribution has
a copy of them, and a commit adds those of the contributors to the weights.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from diloco.data.sample_stream import Place
from diloco.data.unit_log import UnitLog
from diloco.data.unit_records import UnitPlan, merged, without
from diloco.data.work_units import UnitTakenOver, WorkUnits
from diloco.errors import ReplicaError
from diloco.protocol import keys
from diloco.protocol.records import Commit, Identity
from diloco.store.base import LocalStore, Store
from tests.diloco.clocks import ManualClock
from tests.matrix import matrix

PLAN = UnitPlan(shards="s", context=4, seed=0, samples=47, unit_samples=6, stripes=2)


class Process:
    """A replica process with its local progress."""

    def __init__(self, run: Run, replica: int, seq: int) -> None:
        self.identity = Identity(replica=replica, incarnation=keys.incarnation(seq, "0" * 8))
        self.local: Counter[Place] = Counter()
        self.sent: dict[int, Counter[Place]] = {}
        self.units = WorkUnits(
            UnitLog(run.store, self.identity),
            run.plan,
            is_gone=lambda process: process not in run.alive,
            clock=run.clock,
            timeout_s=10.0,
        )

    def train(self, count: int) -> None:
        self.local.update(self.units.take(count))

    def contribute(self, round: int) -> None:
        self.units.before(round)
        self.sent[round] = Counter(self.local)

    def discard(self) -> None:
        self.local.clear()
        self.units.discarded()


class Run:
    """The rounds of a run, and what its weights contain."""

    def __init__(self, store: Store, plan: UnitPlan = PLAN) -> None:
        self.store = store
        self.plan = plan
        self.clock = ManualClock()
        self.round = 1
        self.weights: Counter[Place] = Counter()
        self.processes: list[Process] = []
        self.alive: set[Identity] = set()
        self.starts: Counter[int] = Counter()

    def start(self, replica: int) -> Process:
        self.starts[replica] += 1
        process = Process(self, replica, self.starts[replica])
        self.processes.append(process)
        self.alive.add(process.identity)
        return process

    def kill(self, process: Process) -> None:
        """The process ends; what it has sent can still be committed."""
        self.alive.discard(process.identity)

    def commit(self, included: list[Process], *, void: bool = False, keep: bool = True) -> None:
        """Commit the round; a process that is not included keeps its local progress or discards
        it."""
        round, self.round = self.round, self.round + 1
        self.clock.now_s += 30.0
        commit = Commit(
            round=round,
            fragment=0,
            committer=included[0].identity,
            contributors=tuple(p.identity for p in included),
            void="damaged" if void else "",
            tokens_total=0,
            committed_total=round,
            wall_s=0.0,
        )
        self.store.create(keys.commit(round), commit.to_bytes())
        for process in self.processes:
            is_included = process in included and not void
            if is_included:
                self.weights.update(process.sent[round])
            if process.identity not in self.alive:
                continue
            if is_included:
                process.local -= process.sent[round]
                process.units.after(round, "included")
            else:
                process.units.after(round, "void" if void else "late")
                if not keep and not void:
                    process.discard()

    def check(self, *, epochs: int) -> None:
        """Check that each sample of the first epochs is in the weights once, and none twice."""
        assert max(self.weights.values()) == 1
        for epoch in range(epochs):
            seen = {place.position for place in self.weights if place.epoch == epoch}
            assert seen == set(range(self.plan.samples)), (epoch, len(seen))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(LocalStore(tmp_path))


def test_replicas_see_an_epoch_once(run: Run) -> None:
    both = [run.start(0), run.start(1)]
    for _ in range(10):
        for process in both:
            process.train(5)
            process.contribute(run.round)
        run.commit(both)
    run.check(epochs=2)
    assert sum(run.weights.values()) == 100


def test_samples_that_a_killed_process_did_not_contribute_are_trained_by_another(run: Run) -> None:
    dead, other = run.start(0), run.start(1)
    for process in (dead, other):
        process.train(5)
        process.contribute(run.round)
    run.commit([dead, other])
    dead.train(4)
    run.kill(dead)
    for _ in range(12):
        other.train(5)
        other.contribute(run.round)
        run.commit([other])
    run.check(epochs=1)


@pytest.mark.parametrize("is_included", [True, False])
def test_a_process_that_dies_before_the_commit(run: Run, is_included: bool) -> None:
    """Its contribution counts if the round includes it, and its samples are open if not."""
    dead, other = run.start(0), run.start(1)
    for process in (dead, other):
        process.train(5)
        process.contribute(run.round)
    run.kill(dead)
    run.commit([dead, other] if is_included else [other])
    assert sum(run.weights.values()) == (10 if is_included else 5)
    for _ in range(12):
        other.train(5)
        other.contribute(run.round)
        run.commit([other])
    run.check(epochs=1)


def test_units_are_not_taken_over_while_a_contribution_is_undecided(run: Run) -> None:
    dead, other = run.start(0), run.start(1)
    dead.train(5)
    dead.contribute(run.round)
    run.kill(dead)
    other.train(41)
    assert Counter(place.epoch for place in other.local) == {0: 41}
    other.train(8)  # the rest of epoch 0 is undecided
    assert Counter(place.epoch for place in other.local) == {0: 41, 1: 8}
    other.contribute(run.round)
    run.commit([other])
    other.train(12)
    assert Counter(place.epoch for place in other.local)[0] == 6
    other.contribute(run.round)
    run.commit([other])
    run.check(epochs=1)


def test_the_next_process_of_a_replica_continues_its_units(run: Run) -> None:
    first = run.start(0)
    first.train(4)
    first.contribute(run.round)
    run.commit([first])
    first.train(3)
    run.kill(first)
    second = run.start(0)
    second.train(2)
    assert set(second.local) == {Place(0, 4), Place(0, 5)}
    for _ in range(10):
        second.train(6)
        second.contribute(run.round)
        run.commit([second])
    run.check(epochs=1)


def test_late_and_void_work_is_recorded_again(run: Run) -> None:
    slow, other = run.start(0), run.start(1)
    for included, void in (([other], False), ([slow, other], True), ([slow, other], False)):
        for process in (slow, other):
            process.train(5)
            process.contribute(run.round)
        run.commit(included, void=void)
    assert sum(run.weights.values()) == 30
    run.check(epochs=0)


def test_discarded_work_is_trained_again(run: Run) -> None:
    slow, other = run.start(0), run.start(1)
    for _ in range(3):
        for process in (slow, other):
            process.train(5)
            process.contribute(run.round)
        run.commit([other], keep=False)
    for _ in range(8):
        for process in (slow, other):
            process.train(5)
            process.contribute(run.round)
        run.commit([slow, other])
    run.check(epochs=1)


def test_a_round_that_is_repeated_records_only_what_it_contains(run: Run) -> None:
    """Non-finite weights are discarded after the samples were recorded for the round."""
    process = run.start(0)
    process.train(6)
    process.units.before(run.round)
    process.discard()
    process.train(3)
    process.contribute(run.round)
    run.commit([process])
    run.kill(process)
    other = run.start(1)
    for _ in range(9):
        other.train(6)
        other.contribute(run.round)
        run.commit([other])
    run.check(epochs=1)


def test_a_suspended_process_does_not_contribute_samples_of_another(run: Run) -> None:
    suspended, other = run.start(0), run.start(1)
    suspended.train(5)
    run.alive.discard(suspended.identity)
    for _ in range(10):
        other.train(5)
        other.contribute(run.round)
        run.commit([other])
    with pytest.raises(UnitTakenOver, match="work unit 0 of epoch 0 was taken over"):
        suspended.contribute(run.round)
    run.check(epochs=1)


@matrix("seed", range(12), fast=3)
def test_an_epoch_is_seen_once_under_random_kills(tmp_path: Path, seed: int) -> None:
    """Replicas start, die at any point, miss rounds and discard work; then one of them ends the
    epoch alone."""
    rng = random.Random(seed)
    run = Run(LocalStore(tmp_path))
    for _ in range(14):
        live = [p for p in run.processes if p.identity in run.alive]
        while len(live) < rng.randint(1, 4):
            free = set(range(5)) - {p.identity.replica for p in live}
            live.append(run.start(rng.choice(sorted(free))))
        sent: list[Process] = []
        for process in list(live):
            process.train(rng.randint(1, 7))
            if rng.random() < 0.1:
                run.kill(process)
                continue
            if rng.random() < 0.1:
                process.discard()
                process.train(2)
            process.contribute(run.round)
            sent.append(process)
            if rng.random() < 0.15:
                run.kill(process)
        included = [p for p in sent if rng.random() < 0.8] or sent
        if included:
            run.commit(included, void=rng.random() < 0.1, keep=rng.random() < 0.7)
        assert max(run.weights.values(), default=0) <= 1
    for process in run.processes:
        run.kill(process)
    epochs = max((place.epoch for place in run.weights), default=0)
    last = run.start(7)
    for _ in range(40):
        last.train(5)
        last.contribute(run.round)
        run.commit([last])
    run.check(epochs=epochs + 1)


def test_a_claim_needs_few_requests(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    plan = UnitPlan(shards="s", context=4, seed=0, samples=6000, unit_samples=6, stripes=4)
    run = Run(store, plan)
    replicas = [run.start(replica) for replica in range(4)]
    for process in replicas:
        process.train(6)
    store.requests.clear()
    for _ in range(20):
        for process in replicas:
            process.contribute(run.round)
        run.commit(replicas)
        for process in replicas:
            process.train(6)
    each = {name: count / 80 for name, count in store.requests.items()}
    assert each["create"] <= 2.25  # with a quarter of a commit
    assert each["put"] == 1.0
    assert sum(each.values()) < 4


class CountingStore(LocalStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()

    def put(self, key: str, data: object) -> None:
        self.requests["put"] += 1
        super().put(key, data)  # type: ignore[arg-type]

    def create(self, key: str, data: object) -> bool:
        self.requests["create"] += 1
        return super().create(key, data)  # type: ignore[arg-type]

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.requests["get"] += 1
        return super().get(key, limit=limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests["get"] += 1
        return super().get_range(key, start, length)


def test_other_shards_are_refused(run: Run) -> None:
    run.start(0)
    run.plan = UnitPlan(**{**PLAN.__dict__, "context": 5})
    with pytest.raises(ReplicaError, match="all replicas of a run need the same shards"):
        run.start(1)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"v": 3, "writer": 1}', b"x" * 100])
def test_damaged_lists_and_links_stop_no_replica(run: Run, data: bytes) -> None:
    dead, other = run.start(0), run.start(1)
    dead.train(5)
    run.kill(dead)
    run.store.put(keys.unit_link(0, 0, 0), data)
    run.store.put(keys.held_units(9, "00001-00000000"), data)
    other.train(46)
    assert all(place.position >= 6 for place in other.local if place.epoch == 0)


def test_ranges() -> None:
    assert merged([(4, 6), (0, 2), (2, 3), (5, 9), (7, 7)]) == ((0, 3), (4, 9))
    assert without(10, [(2, 4), (3, 6)]) == ((0, 2), (6, 10))
    assert without(3, [(0, 3)]) == ()
