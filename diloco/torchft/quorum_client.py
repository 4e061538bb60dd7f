"""The client of a member for the Manager's rounds: its number and lease, quorums and votes.

The decisions are pure functions of :mod:`diloco.protocol.manager_rounds`; this module executes them
on the store. The first member that sees that a decision is possible creates its record; the others
read it.

A round is formed only after the previous round has been decided. If members of that round are
missing, its commit is *closed*: a member that returns learns that its step was not committed. So
committed rounds form one line (:mod:`diloco.protocol.manager_branches`), and no two rounds continue
from the same state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

from diloco.clock import Clock
from diloco.membership.lease import claim_incarnation
from diloco.protocol import manager_keys
from diloco.protocol.manager_branches import UNKNOWN, Line, line_before
from diloco.protocol.manager_records import CommitDecision, Join, Quorum, QuorumMember, Vote
from diloco.protocol.manager_rounds import ConfigMismatch, decide_commit, decide_quorum
from diloco.protocol.records import Identity
from diloco.store.base import Store
from diloco.torchft.peers import MemberOptions, Peers
from diloco.torchft.polling import Waiting
from diloco.torchft.round_records import RoundRecords, claim_number

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class QuorumRequest:
    """The parameters of a member's quorum request, sent as a :class:`Join`."""

    step: int
    min_replicas: int
    init_sync: bool
    shrink_only: bool
    allow_heal: bool
    mode: str
    branch: int = UNKNOWN
    head: int = 0


class Session:
    """One process of a member, from its first heartbeat to its last.

    ``n`` is the number of the newest quorum that this process has read, ``quorum`` its record; 0
    and None before the first.
    """

    def __init__(self, store: Store, options: MemberOptions, *, nonce: str, clock: Clock) -> None:
        self.store = store
        self.rank = options.rank
        self.world_size = options.world_size
        self.stop = threading.Event()
        self._options = options
        self._clock = clock
        number = claim_number(store, replica_id=options.replica_id, rank=options.rank, nonce=nonce)
        self.me = claim_incarnation(store, number, nonce=nonce)
        self.records = RoundRecords(store, self.me)
        self.peers = Peers(store, self.me, options, records=self.records, clock=clock)
        self._is_new = True
        self.peers.lease.start()
        self.n = self.records.newest_quorum(max(0, self.records.oldest_kept() - 1))
        self.quorum = self.records.quorum(self.n)

    def wait(self, timeout_s: float) -> Waiting:
        return Waiting(
            self._clock,
            self.stop,
            timeout_s=timeout_s,
            longest_pause_s=self._options.poll_interval_s,
            check=self.peers.check_fence,
        )

    def end(self) -> None:
        """Leave the group, with a last heartbeat that shows it."""
        self.stop.set()
        self.peers.end()

    # -- quorum ----------------------------------------------------------------------------------

    def join(self, asking: QuorumRequest, *, timeout_s: float) -> Quorum:
        """Wait for the next quorum that includes this process.

        Raises :class:`TimeoutError`, :class:`~diloco.protocol.manager_rounds.ConfigMismatch`, and
        :class:`~diloco.errors.FencedOut` if a newer process of this member has started.
        """
        self.peers.check_fence()
        if self._is_new:
            self._check_mode(asking.mode)
            self._is_new = False
        self.peers.lease.update(step=asking.step, round=self.n + 1, state="training")
        wait = self.wait(timeout_s)
        while True:
            newest = self.records.newest_quorum(self.n)
            if newest > self.n and (quorum := self._take(newest)) and self._has_seat(quorum):
                return quorum  # formed after an earlier call of this process timed out
            n, join = self.n + 1, self._ask(asking)
            decided = self._decided(n, join, wait)
            if decided is None:
                self._take(self.records.newest_quorum(self.records.oldest_kept() - 1))
            else:
                self.n, self.quorum = decided.n, decided
                if self._has_seat(decided):
                    return decided
            self.store.delete([manager_keys.join(n, join.member, join.incarnation)])

    def _take(self, n: int) -> Quorum | None:
        self.n, self.quorum = n, self.records.quorum(n)
        return self.quorum

    def _has_seat(self, quorum: Quorum) -> bool:
        return any(process_of(seat) == self.me for seat in quorum.seats)

    def _check_mode(self, mode: str) -> None:
        """Refuse to join a live group with another configuration. A group whose leases have all
        expired is not live."""
        newest = self.quorum
        if newest is not None and newest.mode != mode and not self.others_gone():
            raise ConfigMismatch(f"expected mode {newest.mode!r} of the group, found {mode!r}")

    def others_gone(self) -> bool:
        """Return whether all other members of the newest quorum have died (True without a quorum).
        Waits for their leases to expire, if there is no other evidence."""
        seats = self.quorum.seats if self.quorum else ()
        others = [process_of(seat) for seat in seats if seat.member != self.me.replica]
        wait = self.wait(1.5 * self._options.heartbeat_timeout_s)
        self.peers.look(at_once=True)
        while not all(self.peers.is_gone(other) for other in others):
            if not wait.pause():
                return False
            self.peers.look()
        return True

    def _ask(self, asking: QuorumRequest) -> Join:
        me, n = self.me, self.n + 1
        join = Join(
            member=me.replica,
            incarnation=me.incarnation,
            replica_id=self._options.replica_id,
            rank=self.rank,
            world_size=self.world_size,
            **asdict(asking),
        )
        self.store.put(manager_keys.join(n, me.replica, me.incarnation), join.to_bytes())
        return join

    def _decided(self, n: int, own: Join, wait: Waiting) -> Quorum | None:
        """Wait for quorum ``n``. Returns None if its records have been deleted, because this
        process was paused for many rounds."""
        previous = self.quorum
        check_oldest_s = self._options.heartbeat_interval_s
        seen = {manager_keys.join(n, own.member, own.incarnation): own}
        looked = False
        last_join_s = 0.0
        while True:
            if quorum := self.records.quorum(n):
                return quorum
            joined_before = len(seen)
            self.records.read_new(manager_keys.joins(n), Join, seen)
            if len(seen) > joined_before:
                last_join_s = wait.waited_s
            incomplete = previous is None or not _all_joined(previous, seen.values())
            if incomplete or any(self.peers.is_gone(process_of(join)) for join in seen.values()):
                self.peers.look(at_once=not looked)
                looked = True
            joins = [join for join in seen.values() if not self.peers.is_gone(process_of(join))]
            if quorum := self._form(n, joins, previous, wait.waited_s - last_join_s):
                return None if quorum.writer == self.me and self._was_deleted(quorum) else quorum
            if wait.waited_s >= check_oldest_s:
                check_oldest_s = 2 * wait.waited_s
                if self.records.oldest_kept() > n:
                    return None
            if not wait.pause():
                absent = self.peers.absent(join.member for join in joins)
                raise TimeoutError(
                    f'status: Cancelled, message: "Timeout expired": expected a quorum of '
                    f"{own.min_replicas} replicas of {own.world_size} ranks within "
                    f"{wait.waited_s:.2f} s, found {_heads(seen.values())}{absent}"
                )

    def _form(
        self,
        n: int,
        joins: list[Join],
        previous: Quorum | None,
        waited_s: float,
        *,
        looked: bool = False,
    ) -> Quorum | None:
        """Create quorum ``n`` if these joins suffice, after closing the previous round."""
        live = self.peers.live()

        def decide(line: Line | None, holders: Collection[Identity] = ()) -> Quorum | None:
            return decide_quorum(
                joins,
                n=n,
                me=self.me,
                previous=previous,
                live=live,
                waited_s=waited_s,
                join_timeout_s=self._options.join_timeout_s,
                replica_of=self.peers.replicas_of(live),
                majority_guard=self._options.majority_guard,
                line=line,
                holders=holders,
            )

        if decide(None) is None:
            return None
        line, holders = self._line(previous, joins)
        if decide(line, holders) is None:
            return None
        if previous is not None and not _all_joined(previous, joins):
            line = line_before(previous, committed=self.records.close(previous.n))
            if line.head == previous.n:
                holders = self._live_holders(previous, line)
        plan = decide(line, holders)
        if plan is None:
            return None
        if plan.branch == n and not looked:  # a holder can have returned since the leases were read
            self.peers.look(at_once=True)
            return self._form(n, joins, previous, waited_s, looked=True)
        if not self.store.create(manager_keys.quorum(n), plan.to_bytes()):
            return self.records.quorum(n)
        if plan.branch == n:
            log.warning(
                "branch %d begins at step %d: no live process holds the state that round %d of "
                "branch %d committed",
                n,
                plan.step,
                line.head,
                line.branch,
            )
        return plan

    def _was_deleted(self, quorum: Quorum) -> bool:
        """Return whether round ``n`` was decided and deleted before; then delete this quorum."""
        if self.records.oldest_kept() <= quorum.n:
            return False
        self.store.delete([manager_keys.quorum(quorum.n)])
        return True

    def _line(
        self, previous: Quorum | None, joins: Iterable[Join]
    ) -> tuple[Line, frozenset[Identity]]:
        """Return the line that the next round continues, and the live processes that hold its
        newest state. If all members of the previous round have joined, their joins show whether it
        was committed."""
        if previous is None:
            return Line(), frozenset()
        if _all_joined(previous, joins):
            heads = {j.head for j in joins if j.branch == previous.branch}
            line = line_before(previous, committed=previous.n in heads)
            return line, frozenset()
        decisions = self.records.decisions(previous.n)
        line = line_before(previous, committed=any(d.committed for d in decisions))
        return line, self._live_holders(previous, line)

    def _live_holders(self, previous: Quorum, line: Line) -> frozenset[Identity]:
        """Return the processes that hold, or can hold, the newest committed state, of replicas
        whose ranks are all live."""
        groups: list[list[QuorumMember]] = []
        if line.head < previous.n:  # it failed: the members that it started from have its state
            groups += _by_replica(seat for seat in previous.seats if seat.newest)
        maker = self.records.quorum(line.head) if line.head else None
        if maker is not None:
            decisions = self.records.decisions(line.head)
            included = {m for d in decisions if d.committed for m in d.included}
            groups += [
                group
                for group in _by_replica(maker.seats)
                if included >= {seat.member for seat in group}
            ]
        live = self.peers.live()
        return frozenset(
            process_of(seat)
            for group in groups
            if all(s.member in live and not self.peers.is_gone(process_of(s)) for s in group)
            for seat in group
        )

    def is_newest(self, n: int) -> bool:
        """Return whether no round after ``n`` has begun."""
        return self.records.quorum(n + 1) is None

    # -- the end of a round ----------------------------------------------------------------------

    def agree(
        self, quorum: Quorum, vote: Vote, *, c: int, needed: frozenset[int], timeout_s: float
    ) -> CommitDecision:
        """Vote on a round and return the decision. Raises :class:`~diloco.errors.FencedOut`."""
        self.peers.check_fence()
        seen = {manager_keys.vote(quorum.n, c, vote.member, vote.incarnation): vote}
        self.store.put(next(iter(seen)), vote.to_bytes())
        key = manager_keys.commit(quorum.n, c)
        processes = {process_of(seat) for seat in quorum.seats}
        wait = self.wait(timeout_s)
        looked = False
        while True:
            if decision := self.records.find(key, CommitDecision):
                return decision
            self.records.read_new(manager_keys.votes(quorum.n, c), Vote, seen)
            voted = {process_of(v) for v in seen.values()}
            if not looked and any(self.peers.is_gone(process) for process in processes - voted):
                looked = self.peers.look(at_once=True)  # its lease can be older than its join
            plan = decide_commit(
                quorum,
                {v.member: v for v in seen.values() if process_of(v) in processes},
                c=c,
                me=self.me,
                needed=needed,
                gone={process.replica for process in processes if self.peers.is_gone(process)},
                out_of_time=wait.out_of_time,
            )
            if plan is not None:
                if self.store.create(key, plan.to_bytes()):
                    return self._confirmed(quorum, plan)
                continue
            wait.pause()
            self.peers.look()

    def _confirmed(self, quorum: Quorum, plan: CommitDecision) -> CommitDecision:
        """Return the decision, or a closed one if a single replica has committed a round that was
        closed and deleted before."""
        alone = len({seat.replica_id for seat in quorum.seats}) == 1
        if alone and plan.committed and self.records.oldest_kept() > quorum.n:
            return CommitDecision(n=plan.n, c=plan.c, included=(), writer=self.me, closed=True)
        return plan

    def why_lost(self, n: int, process: Identity) -> str:
        """Return why a member will send nothing more in round ``n``; '' if it still can."""
        if not self.peers.look():
            return ""
        if self.peers.is_gone(process):
            return "is gone"
        vote = self.records.find(
            manager_keys.vote(n, 0, process.replica, process.incarnation), Vote
        )
        return f"gave up: {vote.error}" if vote is not None and not vote.ok else ""


def process_of(record: Join | QuorumMember | Vote) -> Identity:
    """Return the process that wrote or is named by a record."""
    return Identity(replica=record.member, incarnation=record.incarnation)


def _by_replica(seats: Iterable[QuorumMember]) -> list[list[QuorumMember]]:
    groups: dict[str, list[QuorumMember]] = {}
    for seat in seats:
        groups.setdefault(seat.replica_id, []).append(seat)
    return list(groups.values())


def _all_joined(quorum: Quorum, joins: Iterable[Join]) -> bool:
    """Return whether every process of ``quorum`` has joined the next one, and so votes no more."""
    return {process_of(seat) for seat in quorum.seats} <= {process_of(join) for join in joins}


def _heads(joins: Iterable[Join]) -> str:
    return ", ".join(sorted(f"{join.replica_id}/{join.rank}" for join in joins))
