"""A member's part in the Manager's rounds: its number and lease, quorums, votes.

Decisions are :mod:`diloco.protocol.manager_rounds`; here they meet the store. The first member
that finds that one can be made creates the record; the others read it.

A round is formed only once the one before is decided. Where members of that one are missing, its
commit is *closed*: a member that comes back finds that its step was not committed. So committed
rounds form one line (:mod:`diloco.protocol.manager_branches`), and no two rounds both continue
the same state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from diloco.clock import Clock
from diloco.errors import FencedOut
from diloco.membership.lease import Lease, Observer, claim_incarnation
from diloco.protocol import manager_keys
from diloco.protocol.manager_branches import UNKNOWN, Line, line_before
from diloco.protocol.manager_records import Floor, Join, Name, Quorum, Seat, Verdict, Vote
from diloco.protocol.manager_rounds import Disagreement, decide_quorum, decide_verdict
from diloco.protocol.records import BadRecord, Identity, Record
from diloco.store.base import MissingKey, Store, StoreError
from diloco.torchft.polling import Waiting

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)

KEPT_ROUNDS = 500
"""Rounds whose quorum and commits are kept, at least."""
SWEEP_ROUNDS_EVERY = 50
"""Older ones are deleted in lots of this many rounds."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What a member says of itself when it asks for a quorum (:class:`Join`)."""

    step: int
    min_replicas: int
    init_sync: bool
    shrink_only: bool
    allow_heal: bool
    mode: str
    branch: int = UNKNOWN
    head: int = 0


class Session:
    """One process of one member, from its first lease beat to its last."""

    def __init__(
        self,
        store: Store,
        *,
        replica_id: str,
        rank: int,
        world_size: int,
        nonce: str,
        clock: Clock,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
        join_timeout_s: float,
        poll_interval_s: float,
        majority_guard: bool = True,
    ) -> None:
        self.store = store
        self._majority_guard = majority_guard
        self.rank = rank
        self.stop = threading.Event()
        self._replica_id = replica_id
        self.world_size = world_size
        self._clock = clock
        self._join_timeout_s = join_timeout_s
        self._poll_interval_s = poll_interval_s
        number = claim_number(store, replica_id=replica_id, rank=rank, nonce=nonce)
        self.me = claim_incarnation(store, number, nonce=nonce)
        self._look_every_s = heartbeat_interval_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._is_new = True
        self._look_lock = threading.Lock()
        self._next_look_s = clock.monotonic() + heartbeat_interval_s
        self._lease = Lease(
            store,
            self.me,
            clock=clock,
            interval_s=heartbeat_interval_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            device="",
        )
        self._observer = Observer(
            store,
            clock=clock,
            timeout_s=heartbeat_timeout_s,
            steady_since=lambda: self._lease.steady_since_s,
        )
        self._replicas: dict[int, str] = {number: replica_id}
        self._lease.start()
        self.n = self._newest_after(max(0, self._floor() - 1))
        """Number of the newest quorum this member knows of; 0 before the first."""
        self.quorum = self._find(manager_keys.quorum(self.n), Quorum)

    def wait(self, timeout_s: float) -> Waiting:
        return Waiting(
            self._clock,
            self.stop,
            timeout_s=timeout_s,
            longest_pause_s=self._poll_interval_s,
            check=self.check_fence,
        )

    def check_fence(self) -> None:
        """Raise :class:`~diloco.errors.FencedOut` if a newer process of this member has started."""
        if newer := self._observer.newer_process(self.me):
            if not self._lease.fenced:
                log.error("%s is fenced out by incarnation %s", self.me, newer)
            self._lease.fenced = True
        if self._lease.fenced:
            raise FencedOut(
                f"a newer process of replica {self._replica_id!r}, rank {self.rank}, has started: "
                "this one is no longer a member and must end"
            )

    def end(self) -> None:
        """Leave: the others see at once that this process is gone."""
        self.stop.set()
        try:
            self._lease.end("left")
        except StoreError as error:
            log.error("%s leaves without a last beat: %s", self.me, error)

    # -- quorum ----------------------------------------------------------------------------------

    def join(self, asking: Asking, *, timeout_s: float) -> Quorum:
        """The next quorum that has this process in it. Raises :class:`TimeoutError`,
        :class:`~diloco.protocol.manager_rounds.Disagreement`, and
        :class:`~diloco.errors.FencedOut` where a newer process of this member has started."""
        self.check_fence()
        if self._is_new:
            self._check_mode(asking.mode)
            self._is_new = False
        self._lease.update(step=asking.step, round=self.n + 1, state="training")
        wait = self.wait(timeout_s)
        while True:
            newest = self._newest_after(self.n)
            if newest > self.n and (quorum := self._take(newest)) and self._has_seat(quorum):
                return quorum  # formed after an earlier call of this process had timed out
            n, join = self.n + 1, self._ask(asking)
            decided = self._decided(n, join, wait)
            if decided is None:
                self._take(self._newest_after(self._floor() - 1))
            else:
                self.n, self.quorum = decided.n, decided
                if self._has_seat(decided):
                    return decided
            self.store.delete([manager_keys.join(n, join.member, join.incarnation)])

    def _take(self, n: int) -> Quorum | None:
        self.n, self.quorum = n, self._find(manager_keys.quorum(n), Quorum)
        return self.quorum

    def _has_seat(self, quorum: Quorum) -> bool:
        return any(_process(seat) == self.me for seat in quorum.seats)

    def _check_mode(self, mode: str) -> None:
        """A newcomer set up otherwise than a group that goes on must not get in its way. Of a group
        that has died nobody is there any more once the leases have run out."""
        newest = self.quorum
        if newest is not None and newest.mode != mode and not self.others_gone():
            raise Disagreement(f"expected mode {newest.mode!r} of the group, found {mode!r}")

    def others_gone(self) -> bool:
        """Whether no other member of the newest quorum lives, which takes a lease's time to find
        out where one may; True where there is no quorum yet."""
        seats = self.quorum.seats if self.quorum else ()
        others = [_process(seat) for seat in seats if seat.member != self.me.replica]
        wait = self.wait(1.5 * self._heartbeat_timeout_s)
        self.look(at_once=True)
        while not all(self._is_gone(other) for other in others):
            if not wait.pause():
                return False
            self.look()
        return True

    def _ask(self, asking: Asking) -> Join:
        me, n = self.me, self.n + 1
        join = Join(
            member=me.replica,
            incarnation=me.incarnation,
            replica_id=self._replica_id,
            rank=self.rank,
            world_size=self.world_size,
            step=asking.step,
            min_replicas=asking.min_replicas,
            init_sync=asking.init_sync,
            shrink_only=asking.shrink_only,
            allow_heal=asking.allow_heal,
            mode=asking.mode,
            branch=asking.branch,
            head=asking.head,
        )
        self.store.put(manager_keys.join(n, me.replica, me.incarnation), join.to_bytes())
        return join

    def _decided(self, n: int, own: Join, wait: Waiting) -> Quorum | None:
        """Quorum ``n``, as soon as there is one; None where it was decided and deleted long ago,
        because this process was paused."""
        previous = self.quorum
        look_at_floor_s = self._look_every_s
        seen = {manager_keys.join(n, own.member, own.incarnation): own}
        looked = False
        last_came_s = 0.0
        while True:
            if quorum := self._find(manager_keys.quorum(n), Quorum):
                return quorum
            known = len(seen)
            self._read_new(manager_keys.joins(n), Join, seen)
            if len(seen) > known:
                last_came_s = wait.waited_s
            absent = previous is None or not _all_joined(previous, seen.values())
            if absent or any(self._is_gone(_process(join)) for join in seen.values()):
                self.look(at_once=not looked)
                looked = True
            joins = [join for join in seen.values() if not self._is_gone(_process(join))]
            if quorum := self._form(n, joins, previous, wait.waited_s - last_came_s):
                return None if quorum.writer == self.me and self._was_deleted(quorum) else quorum
            if wait.waited_s >= look_at_floor_s:
                look_at_floor_s = 2 * wait.waited_s
                if self._floor() > n:
                    return None
            if not wait.pause():
                raise TimeoutError(
                    f'status: Cancelled, message: "Timeout expired": expected a quorum of '
                    f"{own.min_replicas} replicas of {own.world_size} ranks within "
                    f"{wait.waited_s:.2f} s, found {_heads(seen.values())}{self._absent(joins)}"
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
        """Create quorum ``n`` if these joins make one, after the round before is settled."""
        live = self._observer.live() | {self.me.replica}

        def decide(line: Line | None, holders: Collection[Identity] = ()) -> Quorum | None:
            return decide_quorum(
                joins,
                n=n,
                me=self.me,
                previous=previous,
                live=live,
                waited_s=waited_s,
                join_timeout_s=self._join_timeout_s,
                replica_of=self._names_of(live),
                majority_guard=self._majority_guard,
                line=line,
                holders=holders,
            )

        if decide(None) is None:
            return None
        line, holders = self._line(previous, joins)
        if decide(line, holders) is None:
            return None
        if previous is not None and not _all_joined(previous, joins):
            line = line_before(previous, committed=self._close(previous.n))
            if line.head == previous.n:
                holders = self._live_holders(previous, line)
        plan = decide(line, holders)
        if plan is None:
            return None
        if plan.branch == n and not looked:  # a holder may have come back since the last look
            self.look(at_once=True)
            return self._form(n, joins, previous, waited_s, looked=True)
        if not self.store.create(manager_keys.quorum(n), plan.to_bytes()):
            return self._find(manager_keys.quorum(n), Quorum)
        if plan.branch == n:
            log.warning(
                "branch %d begins at step %d: no live process holds what round %d of branch %d "
                "had committed", n, plan.step, line.head, line.branch,
            )  # fmt: skip
        return plan

    def _was_deleted(self, quorum: Quorum) -> bool:
        """Whether this quorum had been decided before and its record deleted; then it is again."""
        if self._floor() <= quorum.n:
            return False
        self.store.delete([manager_keys.quorum(quorum.n)])
        return True

    def _line(
        self, previous: Quorum | None, joins: Iterable[Join]
    ) -> tuple[Line, frozenset[Identity]]:
        """What the next round continues, and which live processes hold the newest state of it.
        Where everybody of the round before has asked again, their joins say how it ended."""
        if previous is None:
            return Line(), frozenset()
        if _all_joined(previous, joins):
            heads = {j.head for j in joins if j.branch == previous.branch}
            line = line_before(previous, committed=previous.n in heads)
            return line, frozenset()
        verdicts = self._verdicts(previous.n)
        line = line_before(previous, committed=any(v.committed for v in verdicts))
        return line, self._live_holders(previous, line)

    def _verdicts(self, n: int) -> list[Verdict]:
        found: list[Verdict] = []
        while verdict := self._find(manager_keys.commit(n, len(found)), Verdict):
            found.append(verdict)
        return found

    def _close(self, n: int) -> bool:
        """Let nothing more be committed in round ``n``; whether anything was."""
        while True:
            verdicts = self._verdicts(n)
            if not (verdicts and verdicts[-1].closed):
                c = len(verdicts)
                closing = Verdict(n=n, c=c, included=(), writer=self.me, closed=True)
                if not self.store.create(manager_keys.commit(n, c), closing.to_bytes()):
                    continue
            return any(verdict.committed for verdict in verdicts)

    def _live_holders(self, previous: Quorum, line: Line) -> frozenset[Identity]:
        """Processes that hold the newest committed state, or could, of replicas all of whose ranks
        live."""
        groups: list[list[Seat]] = []
        if line.head < previous.n:  # it failed: those whose state it started from still hold it
            groups += _by_replica(seat for seat in previous.seats if seat.newest)
        maker = self._find(manager_keys.quorum(line.head), Quorum) if line.head else None
        if maker is not None:
            included = {m for v in self._verdicts(line.head) if v.committed for m in v.included}
            groups += [
                group
                for group in _by_replica(maker.seats)
                if included >= {seat.member for seat in group}
            ]
        live = self._observer.live() | {self.me.replica}
        return frozenset(
            _process(seat)
            for group in groups
            if all(s.member in live and not self._is_gone(_process(s)) for s in group)
            for seat in group
        )

    def _names_of(self, members: Iterable[int]) -> Mapping[int, str]:
        """The replicas of live members; each name is read once."""
        for member in members:
            if member not in self._replicas:
                name = self._find(manager_keys.name(member), Name)
                if name is not None:
                    self._replicas[member] = name.replica_id
        return self._replicas

    def _absent(self, joins: Iterable[Join]) -> str:
        """Which healthy replicas have not asked, for the message of a quorum that times out."""
        asked = {join.member for join in joins}
        names = self._names_of(live := self._observer.live())
        absent = sorted({names.get(m, str(m)) for m in live if m not in asked})
        if not absent:
            return ""
        guard = (
            "; more than half of the healthy replicas, and one with the newest committed state, "
            "have to ask (majority_guard)" if self._majority_guard else ""
        )  # fmt: skip
        return f"; healthy but not asking: {', '.join(absent)}{guard}"

    def is_newest(self, n: int) -> bool:
        """Whether no round after ``n`` has begun."""
        return self._find(manager_keys.quorum(n + 1), Quorum) is None

    # -- the end of a round ----------------------------------------------------------------------

    def agree(
        self, quorum: Quorum, vote: Vote, *, c: int, needed: frozenset[int], timeout_s: float
    ) -> Verdict:
        """Vote, and return what the vote came to. Raises :class:`~diloco.errors.FencedOut`."""
        self.check_fence()
        seen = {manager_keys.vote(quorum.n, c, vote.member, vote.incarnation): vote}
        self.store.put(next(iter(seen)), vote.to_bytes())
        key = manager_keys.commit(quorum.n, c)
        processes = {_process(seat) for seat in quorum.seats}
        wait = self.wait(timeout_s)
        while True:
            if verdict := self._find(key, Verdict):
                return verdict
            self._read_new(manager_keys.votes(quorum.n, c), Vote, seen)
            plan = decide_verdict(
                quorum,
                {v.member: v for v in seen.values() if _process(v) in processes},
                c=c,
                me=self.me,
                needed=needed,
                gone={who.replica for who in processes if self._is_gone(who)},
                out_of_time=wait.out_of_time,
            )
            if plan is not None:
                if self.store.create(key, plan.to_bytes()):
                    return self._confirmed(quorum, plan)
                continue
            wait.pause()
            self.look()

    def _confirmed(self, quorum: Quorum, plan: Verdict) -> Verdict:
        """A step that one replica commits by itself may have been closed and swept long ago."""
        alone = len({seat.replica_id for seat in quorum.seats}) == 1
        if alone and plan.committed and self._floor() > quorum.n:
            return Verdict(n=plan.n, c=plan.c, included=(), writer=self.me, closed=True)
        return plan

    def why_lost(self, n: int, who: Identity) -> str:
        """Why ``who`` will send nothing more in round ``n``; '' where nothing says so."""
        if not self.look():
            return ""
        if self._is_gone(who):
            return "is gone"
        vote = self._find(manager_keys.vote(n, 0, who.replica, who.incarnation), Vote)
        return f"gave up: {vote.error}" if vote is not None and not vote.ok else ""

    def sweep(self, n: int) -> None:
        """Delete what was exchanged up to round ``n``, which everybody has left behind, also what
        an earlier sweep could not delete; and now and then the records of old rounds."""
        found = [info.key for info in self.store.list(manager_keys.ROUNDS)]
        self._delete_up_to(n, found)
        if n % SWEEP_ROUNDS_EVERY == 0 and (last := n - KEPT_ROUNDS) > 0:
            self.store.put(manager_keys.FLOOR, Floor(n=last + 1).to_bytes())
            for prefix in (manager_keys.COMMITS, manager_keys.QUORUMS):
                self._delete_up_to(last, [info.key for info in self.store.list(prefix)])

    def _delete_up_to(self, n: int, found: Iterable[str]) -> None:
        old = [key for key in found if (of := manager_keys.round_of(key)) is not None and of <= n]
        if old:
            self.store.delete(old)

    def _floor(self) -> int:
        """The oldest round whose records are kept."""
        floor = self._find(manager_keys.FLOOR, Floor)
        return floor.n if floor else 1

    def _is_gone(self, who: Identity) -> bool:
        return who != self.me and self._observer.is_gone(who)

    # -- reading ---------------------------------------------------------------------------------

    def look(self, *, at_once: bool = False) -> bool:
        """Read the leases if that was not done within a heartbeat; whether it was done now."""
        now_s = self._clock.monotonic()
        with self._look_lock:
            if not at_once and now_s < self._next_look_s:
                return False
            self._next_look_s = now_s + self._look_every_s
        self._observer.look()
        return True

    def _find(self, key: str, kind: type[R]) -> R | None:
        try:
            return kind.read(self.store, key)
        except MissingKey:
            return None

    def _read_new(self, prefix: str, kind: type[R], seen: dict[str, R]) -> None:
        for info in self.store.list(prefix):
            if info.key in seen:
                continue
            try:
                record = self._find(info.key, kind)
            except BadRecord as error:
                log.warning("%s is refused: %s", info.key, error)
                continue
            if record is not None:
                seen[info.key] = record

    def _newest_after(self, n: int) -> int:
        """The number of the newest quorum, ``n`` or later: they have no gaps from the floor on, so
        it is searched by doubling and halving."""
        if self._find(manager_keys.quorum(n + 1), Quorum) is None:
            return n
        there, step = n + 1, 2
        while self._find(manager_keys.quorum(n + step), Quorum) is not None:
            there, step = n + step, 2 * step
        missing = n + step
        while missing - there > 1:
            middle = (there + missing) // 2
            if self._find(manager_keys.quorum(middle), Quorum) is not None:
                there = middle
            else:
                missing = middle
        return there


def claim_number(store: Store, *, replica_id: str, rank: int, nonce: str) -> int:
    """The number of that rank of that replica: the one it has had before, else the next free."""
    number = 1
    while True:
        own = Name(number=number, replica_id=replica_id, rank=rank, nonce=nonce)
        try:
            found = Name.read(store, manager_keys.name(number))
        except MissingKey:
            if store.create(manager_keys.name(number), own.to_bytes()):
                return number
            continue
        if (found.replica_id, found.rank) == (replica_id, rank):
            return number
        number += 1


def _process(record: Join | Seat | Vote) -> Identity:
    return Identity(replica=record.member, incarnation=record.incarnation)


def _by_replica(seats: Iterable[Seat]) -> list[list[Seat]]:
    groups: dict[str, list[Seat]] = {}
    for seat in seats:
        groups.setdefault(seat.replica_id, []).append(seat)
    return list(groups.values())


def _all_joined(quorum: Quorum, joins: Iterable[Join]) -> bool:
    """Whether every process of ``quorum`` has asked for the next one: it can vote no more."""
    return {_process(seat) for seat in quorum.seats} <= {_process(join) for join in joins}


def _heads(joins: Iterable[Join]) -> str:
    return ", ".join(sorted(f"{join.replica_id}/{join.rank}" for join in joins))
