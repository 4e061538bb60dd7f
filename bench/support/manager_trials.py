"""Trials of the Manager's rounds under virtual time: kills, hangs, pauses and stale lists.

The session, recovery and saved states are the Manager's own; only what a step computes is replaced,
by a history of the rounds whose commits made a state. Every store operation is a point where
another process can go on, and where this one can die or fall asleep. One task runs at a time, and
the next is chosen by virtual time and seed, so a seed is one trial.

The oracle knows every process's state. A round is committed when its commit record is created, and
left out by the first quorum whose line lacks it; both are read from the records, because a process
that is paused or hangs in between learns of its commit only after that quorum. It reports:

- ``diverged``: two members committed one round with different results;
- ``doubled``: a state that holds a round twice, or whose step is not the number of its rounds;
- ``resurrected``: a commit from a state that holds a round which its quorum or an earlier one left
  out;
- ``lost``: a round left out although a process that held its result, or was about to learn of its
  commit, had written its lease within the timeout (counted only with the majority guard);
- ``stuck``: no commit by every living replica after the faults had ended.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from diloco.membership.lease import Lease
from diloco.protocol import manager_keys
from diloco.protocol.manager_branches import AbandonedBranch, Line, line_before
from diloco.protocol.manager_records import CommitDecision, Quorum, Vote
from diloco.protocol.manager_rounds import MemberView, counts
from diloco.protocol.records import Identity
from diloco.store.base import (
    LISTED,
    Data,
    MakeParts,
    MissingKey,
    ObjectInfo,
    Pages,
    check_size,
)
from diloco.torchft import peers as peers_module
from diloco.torchft.peers import MemberOptions
from diloco.torchft.quorum_client import QuorumRequest, Session
from diloco.torchft.state_transfer import Recovery
from diloco.torchft.step import Mode

BEAT_S, LEASE_S, JOIN_S, QUORUM_S, ROUND_S = 2.0, 10.0, 20.0, 90.0, 40.0


class Killed(BaseException):
    """Ends a task whose process was killed."""


class Scheduler:
    """Virtual time for tasks, each a thread of which one runs at a time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Task]] = []
        self._count = 0
        self.current: Task | None = None
        self._yielded = threading.Semaphore(0)

    def spawn(self, process: Process, run: Callable[[], None]) -> None:
        self._push(Task(self, process, run), self.now_s)

    def _push(self, task: Task, at_s: float) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, task))

    def sleep(self, seconds: float) -> None:
        task = self.current
        if task is None or threading.current_thread() is not task.thread:
            return  # a helper thread of a task that waits for it
        self._push(task, self.now_s + seconds)
        self._yielded.release()
        task.go.acquire()
        task.process.check()

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            at_s, _, task = heapq.heappop(self._queue)
            if at_s < task.process.asleep_until_s and not task.process.dead:
                self._push(task, task.process.asleep_until_s)
                continue
            self.now_s, self.current = max(self.now_s, at_s), task
            task.resume()
            self._yielded.acquire()
        self.now_s = until_s

    def ended(self) -> None:
        self._yielded.release()

    def drain(self) -> None:
        """Let every task end: its process is dead."""
        while self._queue:
            self.run(self._queue[0][0])


class Task:
    def __init__(self, scheduler: Scheduler, process: Process, run: Callable[[], None]) -> None:
        self.process = process
        self.go = threading.Semaphore(0)
        self._scheduler = scheduler
        self._run = run
        self.thread = threading.Thread(target=self._main, daemon=True)

    def resume(self) -> None:
        if self.thread.is_alive():
            self.go.release()
        else:
            self.thread.start()

    def _main(self) -> None:
        try:
            self.process.check()
            self._run()
        except Killed:
            pass
        finally:
            self._scheduler.ended()


class VirtualClock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.sleep = scheduler.sleep

    def monotonic(self) -> float:
        return self._scheduler.now_s

    def wall(self) -> float:
        return 1e9 + self._scheduler.now_s


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The parameters of a trial. Rates are per store operation of a process."""

    seed: int
    replicas: int = 3
    ranks: int = 1
    min_replicas: int = 1
    save_every: int = 2
    asynchronous: bool = False
    majority_guard: bool = True
    kill: float = 0.003
    pause: float = 0.004
    hang: float = 0.004
    stale: float = 0.05
    faults_s: float = 600.0
    quiet_s: float = 300.0


class Harness:
    """The objects, the processes and the oracle of one trial."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.rng = random.Random(trial.seed)
        self.scheduler = Scheduler()
        self.clock = VirtualClock(self.scheduler)
        self.objects: dict[str, bytes] = {}
        self.since: dict[str, float] = {}
        self.deleted: dict[str, tuple[float, float]] = {}
        self.processes: list[Process] = []
        self.oracle = Oracle(self)
        self.faulty = True

    def start(self, replica: int, rank: int, after_s: float = 0.0) -> None:
        process = Process(self, replica, rank)
        self.processes.append(process)
        process.asleep_until_s = self.scheduler.now_s + after_s
        self.scheduler.spawn(process, process.main)


class Process:
    """One process of one rank of a replica: a heartbeat and a loop of steps."""

    def __init__(self, harness: Harness, replica: int, rank: int) -> None:
        self.harness, self.replica, self.rank = harness, replica, rank
        self.store = ProcessStore(self)
        self.dead = False
        self.asleep_until_s = 0.0
        self.beat_s = -1e9
        self.step = 0
        self.history: tuple[int, ...] = ()
        self.commits = 0
        self.session: Session | None = None
        self.recovery: Recovery | None = None
        self.busy = threading.local()

    def check(self) -> None:
        if self.dead:
            raise Killed

    def kill(self) -> None:
        self.dead = True

    def own_state(self) -> dict[str, int]:
        return {"step": self.step, "batches_committed": 0}

    def load(self, state: Any) -> None:
        self.history = tuple(state)

    def main(self) -> None:
        try:
            self._main()
        except Killed:
            raise
        except AbandonedBranch:
            self.harness.oracle.counts["restarted"] += 1
        except Exception as error:  # a process that ends is started again
            self.harness.oracle.counts[f"ended by {type(error).__name__}"] += 1
        self.kill()
        self.harness.start(self.replica, self.rank, self.harness.rng.uniform(0, 15))

    def _main(self) -> None:
        trial, clock = self.harness.trial, self.harness.clock
        options = MemberOptions(
            replica_id=f"r{self.replica}",
            rank=self.rank,
            world_size=trial.ranks,
            heartbeat_interval_s=BEAT_S,
            heartbeat_timeout_s=LEASE_S,
            join_timeout_s=JOIN_S,
            poll_interval_s=1.0,
            majority_guard=trial.majority_guard,
        )
        nonce = f"{self.harness.rng.getrandbits(32):08x}"
        self.session = Session(self.store, options, nonce=nonce, clock=clock)
        self.recovery = Recovery(
            self.session,
            timeout_s=ROUND_S,
            save_every=trial.save_every,
            own_state=self.own_state,
            clock=clock,
        )
        self.recovery.register("history", self.load, lambda: list(self.history))
        if (own := self.recovery.resume()) is not None:
            self.step = own["step"]
            self.harness.oracle.counts["resumed"] += 1
        while True:
            self._step(self.session, self.recovery)
            clock.sleep(self.harness.rng.uniform(0.5, 3.0))

    def _step(self, session: Session, recovery: Recovery) -> None:
        trial = self.harness.trial
        mode = Mode(
            asynchronous=trial.asynchronous,
            spares=False,
            min_replica_size=trial.min_replicas,
            world_size=trial.ranks,
        )
        asking = QuorumRequest(
            step=self.step,
            min_replicas=trial.min_replicas,
            init_sync=True,
            shrink_only=False,
            allow_heal=True,
            mode=str(mode),
            branch=recovery.branch,
            head=recovery.head,
        )
        try:
            quorum = session.join(asking, timeout_s=QUORUM_S)
        except TimeoutError:
            self.harness.oracle.counts["quorum timeouts"] += 1
            return
        part = mode.part(quorum, session.me.replica, allow_heal=True)
        error = self._take_part(session, recovery, quorum, part.standing)
        enough = part.size >= trial.min_replicas
        vote = Vote(
            member=session.me.replica,
            incarnation=session.me.incarnation,
            ok=enough and not error,
            error=error,
        )
        decision = session.agree(quorum, vote, c=0, needed=part.needed, timeout_s=ROUND_S)
        if counts(quorum, decision, needed=part.needed, member=session.me.replica):
            recovery.committed(quorum)
            self.step += 1
            self.history = (*self.history, quorum.n)
            self.commits += 1
            self.harness.oracle.committed(self, quorum.n)
        if quorum.seats[0].member == session.me.replica:
            session.records.sweep(quorum.n - 1)

    def _take_part(
        self, session: Session, recovery: Recovery, quorum: Quorum, place: MemberView
    ) -> str:
        """Heal and exchange; the error that this member votes with."""
        try:
            if (own := recovery.recover(quorum, place)) is not None:
                self.step = own["step"]
                recovery.apply()
            for seat in [session.me] if self._contributes(place) else []:
                key = manager_keys.payload(quorum.n, seat.replica, seat.incarnation, 0)
                self.store.put(key, b"x")
            wait = session.wait(ROUND_S)
            for seat in place.contributors:
                who = Identity(replica=seat.member, incarnation=seat.incarnation)
                key = manager_keys.payload(quorum.n, who.replica, who.incarnation, 0)
                while not self.store.has(key):
                    if why := session.why_lost(quorum.n, who):
                        return why
                    if not wait.pause():
                        return "timeout"
        except (RuntimeError, TimeoutError) as error:
            return str(error) or "failed"
        return ""

    def _contributes(self, place: MemberView) -> bool:
        return place.seat in place.contributors


class ProcessStore:
    """The store as one process sees it, with what goes wrong for that process."""

    uri = "memory://trial"
    atomic_create = True

    def __init__(self, process: Process) -> None:
        self._process = process
        self._harness = process.harness

    def has(self, key: str) -> bool:
        try:
            self.get(key)
        except MissingKey:
            return False
        return True

    def _pass(self) -> None:
        harness, process, rng = self._harness, self._process, self._harness.rng
        task = harness.scheduler.current
        if task is None or threading.current_thread() is not task.thread:
            return
        harness.scheduler.sleep(rng.uniform(0.005, 0.08))
        trial = harness.trial
        if not harness.faulty:
            return
        if rng.random() < trial.kill:
            harness.oracle.counts["kills"] += 1
            process.kill()
            harness.start(process.replica, process.rank, rng.uniform(0, 60))
        elif rng.random() < trial.pause:  # all of the process: its lease runs out, or nearly
            harness.oracle.counts["pauses"] += 1
            process.asleep_until_s = harness.scheduler.now_s + rng.uniform(2, 60)
            harness.scheduler.sleep(0.0)
        elif rng.random() < trial.hang and threading.current_thread() is task.thread:
            harness.oracle.counts["hangs"] += 1
            harness.scheduler.sleep(rng.uniform(2, 50))  # this thread; its heartbeat goes on
        process.check()

    def _write(self, key: str, data: Data) -> None:
        self._harness.objects[key] = bytes(data)
        self._harness.since.setdefault(key, self._harness.scheduler.now_s)
        self._harness.oracle.written(self._process, key)

    def put(self, key: str, data: Data) -> None:
        self._pass()
        self._write(key, data)
        self._pass()

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        self.put(key, b"".join(bytes(part) for part in make_parts()))

    def create(self, key: str, data: Data) -> bool:
        self._pass()
        created = key not in self._harness.objects
        if created:
            self._write(key, data)
        self._pass()
        return created

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self._pass()
        try:
            data = self._harness.objects[key]
        except KeyError:
            raise MissingKey(key) from None
        return data if limit is None else check_size(key, data, limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        self._pass()
        harness = self._harness
        then_s = harness.scheduler.now_s
        if harness.faulty and harness.rng.random() < harness.trial.stale:
            then_s -= harness.rng.uniform(0, 4)
        there = {key for key, since_s in harness.since.items() if since_s <= then_s}
        there |= {k for k, (since_s, end_s) in harness.deleted.items() if since_s <= then_s < end_s}
        return [
            ObjectInfo(key, len(harness.objects.get(key, b"")))
            for key in sorted(there)
            if key.startswith(prefix)
        ]

    def list_pages(self, prefix: str) -> Pages:
        yield self.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._pass()
        for key in keys:
            if self._harness.objects.pop(key, None) is not None:
                since_s = self._harness.since.pop(key)
                self._harness.deleted[key] = (since_s, self._harness.scheduler.now_s)
        self._pass()


class VirtualLease(Lease):
    """A heartbeat that is a task of its process."""

    def start(self) -> None:
        self.beat()
        self._read_commands(new=False)
        process = self._store._process  # type: ignore[attr-defined]
        process.harness.scheduler.spawn(process, self._run)

    def _run(self) -> None:
        while not self.fenced:
            self._clock.sleep(self.interval_s)
            self.look_around()
            if not self.fenced:
                self.beat()


@dataclass
class Oracle:
    harness: Harness
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    results: dict[int, tuple[int, ...]] = field(default_factory=dict)
    abandoned: dict[int, int] = field(default_factory=dict)
    """Rounds that were left out, and the number of the first quorum that left each out."""
    rounds: dict[int, tuple[Quorum, CommitDecision]] = field(default_factory=dict)
    """The committed rounds, each from the creation of its commit record on."""

    def _report(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.violations.append(f"{self.harness.scheduler.now_s:.1f} s: {kind}: {text}")

    def written(self, process: Process, key: str) -> None:
        if key.startswith("members/"):
            process.beat_s = self.harness.scheduler.now_s
        elif key.startswith(manager_keys.COMMITS):
            decision = CommitDecision.from_bytes(self.harness.objects[key])
            if decision.committed:
                quorum = Quorum.from_bytes(self.harness.objects[manager_keys.quorum(decision.n)])
                self.rounds[quorum.n] = quorum, decision
        elif key.startswith(manager_keys.QUORUMS):
            quorum = Quorum.from_bytes(self.harness.objects[key])
            line = line_before(quorum, committed=False)
            if self.harness.trial.majority_guard:
                self._check_fork(quorum, line)
            earlier = {n: made.branch for n, (made, _) in self.rounds.items() if n < quorum.n}
            left_out = {n for n, branch in earlier.items() if not line.contains(branch, n)}
            self._abandon(left_out, quorum.n)

    def _abandon(self, rounds: set[int], n: int) -> None:
        gone = rounds - set(self.abandoned)
        self.counts["abandoned rounds"] += len(gone)
        self.abandoned |= dict.fromkeys(gone, n)

    def _check_fork(self, quorum: Quorum, line: Line) -> None:
        """At its creation, a quorum leaves out no round whose result a live process holds.

        Later quorums continue its line. A process whose lease had run out then does not bring its
        rounds back, whether it knew of their commit or learns of it afterwards.
        """
        newest: dict[tuple[int, int], Process] = {}
        for process in self.harness.processes:
            newest[process.replica, process.rank] = process
        held: dict[int, list[int]] = {}
        for process in newest.values():
            held.setdefault(process.replica, []).append(self._round_held_by(process))
        for rounds in held.values():
            left_out = min(rounds) > 0 and len(set(rounds)) == 1 and rounds[0] not in self.abandoned
            if left_out and not line.contains(self.rounds[rounds[0]][0].branch, rounds[0]):
                self._report("lost", f"quorum {quorum.n} leaves out round {rounds[0]}")

    def _round_held_by(self, process: Process) -> int:
        """The committed round whose result a live process holds or is about to; 0 for none."""
        fresh = self.harness.scheduler.now_s - process.beat_s < LEASE_S - BEAT_S
        session, recovery = process.session, process.recovery
        if process.dead or not fresh or session is None or recovery is None:
            return 0
        me = session.me
        for n, (quorum, decision) in self.rounds.items():  # a commit which the process has not read
            seats = {Identity(replica=s.member, incarnation=s.incarnation) for s in quorum.seats}
            started_there = (quorum.branch, quorum.head) == (recovery.branch, recovery.head)
            if started_there and me in seats and me.replica in decision.included:
                return n
        last = process.history[-1] if process.history else 0
        return last if recovery.head == last else 0

    def committed(self, process: Process, n: int) -> None:
        history = process.history
        if len(set(history)) != len(history) or process.step != len(history):
            self._report("doubled", f"round {n}: step {process.step} of {history}")
        known = self.results.setdefault(n, history)
        if known != history:
            self._report("diverged", f"round {n}: {known} and {history}")
        if back := [old for old in history if self.abandoned.get(old, n + 1) <= n]:
            self._report("resurrected", f"round {n} continues rounds {sorted(back)}")
        # A process can learn late that its round was committed; the state is then left behind.
        if max(self.results) == n:
            self._abandon({old for old in self.results if old < n} - set(history), n)
        self.counts["commits"] = len(self.results)


def run_trial(trial: Trial) -> Oracle:
    """The oracle after one trial."""
    logging.disable(logging.CRITICAL)
    harness = Harness(trial)
    try:
        with patch.object(peers_module, "Lease", VirtualLease):
            for replica in range(trial.replicas):
                for rank in range(trial.ranks):
                    harness.start(replica, rank, harness.rng.uniform(0, 30))
            harness.scheduler.run(trial.faults_s)
            harness.faulty = False
            for process in harness.processes:
                process.asleep_until_s = min(process.asleep_until_s, trial.faults_s + 60)
            harness.scheduler.run(trial.faults_s + trial.quiet_s)
            alive = [p for p in harness.processes if not p.dead]
            before = {id(p): p.commits for p in alive}
            harness.scheduler.run(trial.faults_s + 2 * trial.quiet_s)
            for process in alive:
                if process.dead or process.commits == before[id(process)]:
                    harness.oracle._report("stuck", f"replica {process.replica}/{process.rank}")
            for process in harness.processes:
                process.kill()
            harness.scheduler.drain()
    finally:
        logging.disable(logging.NOTSET)
    return harness.oracle


VIOLATIONS = ("diverged", "doubled", "resurrected", "lost", "stuck")


def trial_of(seed: int) -> Trial:
    """A trial with everything chosen by its seed."""
    rng = random.Random(f"trial {seed}")
    return Trial(
        seed=seed,
        replicas=rng.choice([2, 3, 3, 4, 5]),
        ranks=rng.choice([1, 1, 2]),
        min_replicas=rng.choice([1, 1, 2]),
        save_every=rng.choice([1, 2, 5]),
        majority_guard=rng.random() < 0.8,
        kill=rng.choice([0.0, 0.002, 0.006]),
        pause=rng.choice([0.0, 0.004, 0.01]),
        hang=rng.choice([0.0, 0.004, 0.01]),
        stale=rng.choice([0.0, 0.0, 0.1]),
    )
