"""Observe the leases of all replicas and syncers.

The observer derives liveness from the time since a lease last changed, on its own monotonic clock
(invariant I5); clocks of two machines are never compared. For suspicion alone it also uses how much
time passed between two heartbeats on the clock of their process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from diloco.clock import Clock
from diloco.protocol import keys
from diloco.protocol.control_pace import SUSPECTED_SHARE, calm_bound_s
from diloco.protocol.parallel_reads import read_each
from diloco.protocol.records import (
    AWAITED_STATE,
    CONTRIBUTED_STATES,
    ENDED_STATES,
    STEPPING_STATES,
    BadRecord,
    Heartbeat,
    Identity,
)
from diloco.store.base import Store, StoreError

log = logging.getLogger(__name__)

REPLICA = "replica"
SYNCER = "syncer"
"""Roles: a syncer reduces and commits rounds, but does not train; rounds do not wait for it."""
ASKED_ROUNDS = 16
"""Rounds for which :meth:`Observer.ask` has created an object that are remembered."""
EXCUSED_GAPS = 2
"""Gaps of the observing process for which one heartbeat of another can stay the last. Usually a
live process has written the next one by then; an observer with gaps all the time has a slow
connection."""


@dataclass(frozen=True)
class Gaps:
    """Times in which a process could observe no lease, because it was paused or the store was
    unavailable: their number, and the monotonic time at which the last one ended."""

    count: int = 0
    until_s: float = float("-inf")

    def silent_since_s(self, since_s: float, *, count: int) -> float:
        """Return the time since which another process is silent if it was last observed at
        ``since_s``, after ``count`` gaps: the end of the last gap, unless there were more than
        :data:`EXCUSED_GAPS` since then."""
        return max(since_s, self.until_s) if self.count <= count + EXCUSED_GAPS else since_s


@dataclass(frozen=True)
class _Seen:
    incarnation: str
    count: int
    since_s: float
    """When the observer found the heartbeat."""
    written_s: float
    """The latest time at which the heartbeat can have been written. The observer reads leases only
    while it waits, so one that it finds changed can be as old as a round."""
    beat: Heartbeat
    moved: bool
    """Whether the observer has seen it change or appear."""
    gaps: int
    """Gaps of the observing process until then."""


class Observer:
    """Records when each lease last changed, on its own clock.

    ``gaps`` is :attr:`Lease.gaps` of this process; with it, no process counts as gone because of
    one or two times in which this one could not observe it. ``unretried`` is the same store without
    retries, for requests that no round may wait for.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        timeout_s: float,
        gaps: Callable[[], Gaps] = Gaps,
        unretried: Store | None = None,
    ) -> None:
        self._gaps = gaps
        self._store = store
        self._unretried = unretried or store
        self._clock = clock
        self._timeout_s = timeout_s
        self._seen: dict[int, _Seen] = {}
        self._looked_s: float | None = None
        """When all leases were last read."""
        self._read_s: dict[int, float] = {}
        """When each lease was last read."""
        self._asked_s: dict[int, float] = {}
        """Since when the calm replicas of a round are asked for frequent heartbeats."""
        self._ask_again_s = float("-inf")
        self._expired: dict[int, tuple[_Seen, float]] = {}
        """The leases that have expired, and when: none becomes live again without a heartbeat, and
        a later round does not ask the replica of a calm one again."""
        self._lock = threading.Lock()

    def look(
        self, *, skip: Collection[int] = frozenset(), only: Collection[int] | None = None
    ) -> frozenset[int]:
        """Read the leases of all replicas, or ``only`` of these, except ``skip``: one list, and one
        GET each. Return the replicas whose lease has ended since it was last read. Thread safe."""
        with self._lock:
            ended = self._look(skip, only)
            if not skip and only is None:
                self._looked_s = self._clock.monotonic()
        return ended

    def _look(self, skip: Collection[int], only: Collection[int] | None) -> frozenset[int]:
        newest: dict[int, str] = {}
        for info in self._store.list(keys.MEMBERS):
            parsed = keys.parse_beat(info.key)
            if parsed and parsed[0] not in skip and (only is None or parsed[0] in only):
                newest[parsed[0]] = max(parsed[1], newest.get(parsed[0], ""))
        return self._read(newest)

    def look_at(self, process: Identity) -> None:
        """Read the lease of this process only: one GET. Thread safe."""
        with self._lock:
            if not self.newer_process(process):
                self._read({process.replica: process.incarnation})

    def _read(self, newest: Mapping[int, str]) -> frozenset[int]:
        """Read the lease of each replica's newest process; return those that are new and ended."""
        ended: set[int] = set()
        leases = {keys.beat(replica, newest[replica]): replica for replica in newest}
        for key, beat in read_each(self._store, Heartbeat, list(leases)).items():
            replica, incarnation = leases[key], newest[leases[key]]
            own = (replica, incarnation)
            if isinstance(beat, Heartbeat) and (beat.replica, beat.incarnation) != own:
                beat = BadRecord("expected the lease of its own key, found another's")
            if isinstance(beat, BadRecord):
                log.warning("lease of replica %d is refused: %s", replica, beat)
                continue
            seen = self._seen.get(replica)
            if seen is None or (seen.incarnation, seen.count) != (incarnation, beat.count):
                self._seen[replica] = self._first_seen(seen, beat)
                if beat.state in ENDED_STATES:
                    ended.add(replica)
        for replica in newest:
            self._read_s[replica] = self._clock.monotonic()
        return frozenset(ended)

    def _first_seen(self, before: _Seen | None, beat: Heartbeat) -> _Seen:
        now_s = written_s = self._clock.monotonic()
        if before and before.incarnation == beat.incarnation:
            since, until = before.beat.uptime_s, beat.uptime_s
            if since is not None and until is not None:
                written_s = min(now_s, before.since_s + max(0.0, until - since))
        moved = self._looked_s is not None
        gaps = self._gaps().count
        return _Seen(beat.incarnation, beat.count, now_s, written_s, beat, moved, gaps)

    def live(self) -> frozenset[int]:
        """Return the replicas whose lease changed within the timeout and has not ended."""
        return self._alive(REPLICA)

    def syncers(self) -> frozenset[int]:
        """Return the live syncers, by replica number."""
        return self._alive(SYNCER)

    def _alive(self, role: str) -> frozenset[int]:
        now_s = self._clock.monotonic()
        return frozenset(
            replica
            for replica, seen in list(self._seen.items())
            if seen.beat.state not in ENDED_STATES
            and seen.beat.role == role
            and not self._has_expired(replica, seen, now_s)
        )

    def ask(self, replicas: Collection[int]) -> None:
        """Ask the calm ones of ``replicas`` for frequent heartbeats: one PUT for each of the rounds
        that they work towards, usually one, once. From then on they expire after the timeout.

        A store error is logged, and the replicas are asked again after the timeout; meanwhile they
        expire after their longer interval, because they do not know that they are awaited."""
        rounds = {
            seen.beat.round
            for replica in replicas
            if (seen := self._seen.get(replica)) and self._calm_s(seen)
        }
        for round in sorted(rounds - self._asked_s.keys()):
            if self._clock.monotonic() >= self._ask_again_s:
                self._ask(round)
        for round in sorted(self._asked_s)[:-ASKED_ROUNDS]:
            self._asked_s.pop(round, None)  # another exchange can forget it too

    def _ask(self, round: int) -> None:
        try:
            self._unretried.put(keys.awaited(round), b"{}")
        except StoreError as error:
            log.warning("cannot ask for heartbeats in round %d, will retry: %s", round, error)
            self._ask_again_s = self._clock.monotonic() + self._timeout_s
        else:
            self._asked_s[round] = self._clock.monotonic()

    def _calm_s(self, seen: _Seen) -> float:
        """Return how long a live replica can leave its lease unchanged beyond the timeout."""
        return calm_bound_s(seen.beat.interval_s, self._timeout_s)

    def _has_expired(self, replica: int, seen: _Seen, now_s: float) -> bool:
        """Return whether a lease has not changed for the timeout, at the time ``now_s``. For a calm
        one this time begins when the replica was asked for heartbeats, and without that after its
        longer interval."""
        expired, expired_s = self._expired.get(replica, (None, 0.0))
        if expired is seen and now_s >= expired_s:
            return True
        has_expired = now_s - self._silent_since_s(seen, seen.since_s) >= self._timeout_s
        if has_expired:
            self._expired[replica] = (seen, now_s)
        return has_expired

    def _silent_since_s(self, seen: _Seen, since_s: float) -> float:
        """Return the time since which the next heartbeat is missing, if the last one is of
        ``since_s``."""
        since_s = self._gaps().silent_since_s(since_s, count=seen.gaps)
        calm_s = self._calm_s(seen)
        if not calm_s:
            return since_s
        asked_s = float("inf")
        if seen.beat.state == AWAITED_STATE:
            asked_s = self._asked_s.get(seen.beat.round, asked_s)
        return min(max(since_s, asked_s), since_s + calm_s)

    def blocked(self) -> dict[int, int]:
        """Return the committed round that each blocked live replica cannot read."""
        beats = {replica: self._seen[replica].beat for replica in self.live()}
        return {r: beat.blocked for r, beat in beats.items() if beat.blocked is not None}

    def ready_to_begin(self) -> frozenset[int]:
        """Return the replicas in :meth:`working_towards` of the first round whose lease has been
        seen to change. To a new observer, the lease of a dead replica looks live until its
        timeout."""
        return frozenset(r for r in self.working_towards(1) if self._seen[r].moved)

    def newest_process(self, replica: int) -> Identity | None:
        """Return the newest process of a replica whose lease was read; None if there is none."""
        seen = self._seen.get(replica)
        return Identity(replica=replica, incarnation=seen.incarnation) if seen else None

    def has_changed(self, replica: int) -> bool:
        """Return whether the lease of a replica has been seen to change or appear."""
        seen = self._seen.get(replica)
        return seen is not None and seen.moved

    def begun(self) -> bool:
        """Return whether the newest process of any replica, live or not, has started its first
        inner step."""
        beats = [seen.beat for seen in list(self._seen.values()) if seen.beat.role == REPLICA]
        return any(beat.step > 0 or beat.state in STEPPING_STATES for beat in beats)

    def is_gone(self, identity: Identity) -> bool:
        """Return whether a process had ended, timed out or been replaced when the leases were last
        read; False for one whose lease has not been seen."""
        seen = self._seen.get(identity.replica)
        if seen is None or identity.incarnation > seen.incarnation:
            return False
        if identity.incarnation < seen.incarnation or seen.beat.state in ENDED_STATES:
            return True
        looked_s = max(self._looked_s or 0.0, self._read_s.get(identity.replica, 0.0))
        return self._has_expired(identity.replica, seen, looked_s)

    def has_reached(self, process: Identity, round: int) -> bool:
        """Return whether a process is not gone and, by its lease, has contributed to the round."""
        seen = self._seen.get(process.replica)
        if seen is None or seen.incarnation != process.incarnation or self.is_gone(process):
            return False
        beat = seen.beat
        return beat.round > round or (beat.round == round and beat.state in CONTRIBUTED_STATES)

    def processes(self) -> tuple[Identity, ...]:
        """Return the live replicas' processes in the order of their numbers."""
        return tuple(
            Identity(replica=replica, incarnation=self._seen[replica].incarnation)
            for replica in sorted(self.live())
        )

    def newer_process(self, identity: Identity) -> str:
        """Return the incarnation of a newer process of the same replica, or ''."""
        seen = self._seen.get(identity.replica)
        return seen.incarnation if seen and seen.incarnation > identity.incarnation else ""

    def working_towards(self, round: int) -> frozenset[int]:
        """Return the live replicas that work towards a round: those that are neither syncing nor in
        a later round."""
        beats = {replica: self._seen[replica].beat for replica in self.live()}
        return frozenset(
            r for r, beat in beats.items() if beat.round <= round and beat.state != "syncing"
        )

    def past(self, round: int) -> frozenset[int]:
        """Return the live replicas that work on a later round."""
        return frozenset(r for r in self.live() if self._seen[r].beat.round > round)

    def suspected(self) -> frozenset[int]:
        """Return the live replicas whose next heartbeat is missing for half of the timeout. They
        keep their share of the weights; if such a replica is alive, its work is late."""
        now_s, patience_s = self._clock.monotonic(), self._timeout_s * SUSPECTED_SHARE
        seen = {replica: self._seen[replica] for replica in self.live()}
        return frozenset(
            replica
            for replica, last in seen.items()
            if now_s - self._silent_since_s(last, last.written_s) >= patience_s
        )
