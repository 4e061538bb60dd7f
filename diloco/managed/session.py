"""A member's part in the Manager's rounds: its number and lease, quorums, votes.

Decisions are :mod:`diloco.rendezvous.manager_rounds`; here they meet the store. Whoever finds that
one can be made creates the record, and whoever is second takes the first one's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from diloco.managed.waiting import Waiting
from diloco.membership import Lease, Observer, claim_incarnation
from diloco.rendezvous import manager_keys
from diloco.rendezvous.clock import Clock
from diloco.rendezvous.manager_records import Join, Name, Quorum, Seat, Verdict, Vote
from diloco.rendezvous.manager_rounds import Disagreement, decide_quorum, decide_verdict
from diloco.rendezvous.records import BadRecord, Identity, Record
from diloco.rendezvous.store import MissingKey, Store

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What a member says of itself when it asks for a quorum (:class:`Join`)."""

    step: int
    min_replicas: int
    init_sync: bool
    shrink_only: bool
    allow_heal: bool
    mode: str


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
    ) -> None:
        self.store = store
        self.rank = rank
        self.stop = threading.Event()
        self._replica_id = replica_id
        self._world_size = world_size
        self._clock = clock
        self._join_timeout_s = join_timeout_s
        self._poll_interval_s = poll_interval_s
        number = claim_number(store, replica_id=replica_id, rank=rank, nonce=nonce)
        self.me = claim_incarnation(store, number, nonce=nonce)
        self._observer = Observer(store, clock=clock, timeout_s=heartbeat_timeout_s)
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
        self._lease.start()
        self.n = self._newest_quorum()
        """Number of the newest quorum this member knows of; 0 before the first."""

    def wait(self, timeout_s: float) -> Waiting:
        return Waiting(
            self._clock, self.stop, timeout_s=timeout_s, longest_pause_s=self._poll_interval_s
        )

    def end(self) -> None:
        """Leave: the others see at once that this process is gone."""
        self.stop.set()
        self._lease.end("left")

    # -- quorum ----------------------------------------------------------------------------------

    def join(self, asking: Asking, *, timeout_s: float) -> Quorum:
        """The next quorum that has this process in it. Raises :class:`TimeoutError`,
        :class:`~diloco.rendezvous.manager_rounds.Disagreement`, and
        :class:`~diloco.errors.FencedOut` where a newer process of this member has started."""
        self._lease.check_fence()
        if self._is_new:
            self._check_mode(asking.mode)
            self._is_new = False
        self._lease.update(step=asking.step, round=self.n + 1, state="training")
        wait = self.wait(timeout_s)
        while True:
            quorum = self._decided(self.n + 1, self._ask(asking), wait)
            self.n = quorum.n
            if any(_process(seat) == self.me for seat in quorum.seats):
                return quorum

    def _check_mode(self, mode: str) -> None:
        """A newcomer set up otherwise than a group that goes on must not get in its way. Of a group
        that has died nobody is there any more once the leases have run out."""
        newest = self._find(manager_keys.quorum(self.n), Quorum)
        if newest is None or newest.mode == mode:
            return
        others = [_process(s) for s in newest.seats if s.member != self.me.replica]
        wait = self.wait(1.5 * self._heartbeat_timeout_s)
        self.look(at_once=True)
        while not all(self._observer.is_gone(other) for other in others):
            if not wait.pause():
                raise Disagreement(f"expected mode {newest.mode!r} of the group, found {mode!r}")
            self.look()

    def _ask(self, asking: Asking) -> Join:
        me, n = self.me, self.n + 1
        join = Join(
            member=me.replica,
            incarnation=me.incarnation,
            replica_id=self._replica_id,
            rank=self.rank,
            world_size=self._world_size,
            step=asking.step,
            min_replicas=asking.min_replicas,
            init_sync=asking.init_sync,
            shrink_only=asking.shrink_only,
            allow_heal=asking.allow_heal,
            mode=asking.mode,
        )
        self.store.put(manager_keys.join(n, me.replica, me.incarnation), join.to_bytes())
        return join

    def _decided(self, n: int, own: Join, wait: Waiting) -> Quorum:
        previous = self._find(manager_keys.quorum(n - 1), Quorum)
        before = {seat.member for seat in previous.seats} if previous else set()
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
            absent = not before or not before <= {join.member for join in seen.values()}
            if absent or any(self._observer.is_gone(_process(join)) for join in seen.values()):
                self.look(at_once=not looked)
                looked = True
            plan = decide_quorum(
                [join for join in seen.values() if not self._observer.is_gone(_process(join))],
                n=n,
                me=self.me,
                previous=previous,
                live=self._observer.live(),
                waited_s=wait.waited_s - last_came_s,
                join_timeout_s=self._join_timeout_s,
            )
            if plan is not None:
                if self.store.create(manager_keys.quorum(n), plan.to_bytes()):
                    return plan
                continue
            if not wait.pause():
                raise TimeoutError(
                    f'status: Cancelled, message: "Timeout expired": expected a quorum of '
                    f"{own.min_replicas} replicas of {own.world_size} ranks within "
                    f"{wait.waited_s:.2f} s, found {_heads(seen.values())}"
                )

    # -- the end of a round ----------------------------------------------------------------------

    def agree(
        self, quorum: Quorum, vote: Vote, *, c: int, needed: frozenset[int], timeout_s: float
    ) -> Verdict:
        """Vote, and return what the vote came to."""
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
                gone={who.replica for who in processes if self._observer.is_gone(who)},
                out_of_time=wait.out_of_time,
            )
            if plan is not None:
                if self.store.create(key, plan.to_bytes()):
                    return plan
                continue
            wait.pause()
            self.look()

    def why_lost(self, n: int, who: Identity) -> str:
        """Why ``who`` will send nothing more in round ``n``; '' where nothing says so."""
        if not self.look():
            return ""
        if self._observer.is_gone(who):
            return "is gone"
        vote = self._find(manager_keys.vote(n, 0, who.replica, who.incarnation), Vote)
        return f"gave up: {vote.error}" if vote is not None and not vote.ok else ""

    def sweep(self, n: int) -> None:
        """Delete what was exchanged in round ``n``, which everybody has left behind."""
        if n > 0:
            keys_of = [info.key for info in self.store.list(manager_keys.round_dir(n))]
            self.store.delete(keys_of)

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

    def _newest_quorum(self) -> int:
        """The number of the newest quorum; they have no gaps, so it is searched by halving."""
        if self._find(manager_keys.quorum(1), Quorum) is None:
            return 0
        there, missing = 1, 2
        while self._find(manager_keys.quorum(missing), Quorum) is not None:
            there, missing = missing, 2 * missing
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


def _heads(joins: Iterable[Join]) -> str:
    return ", ".join(sorted(f"{join.replica_id}/{join.rank}" for join in joins))
