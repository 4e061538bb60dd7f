"""The lease of a member and its view of the other members' leases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diloco.clock import Clock
from diloco.errors import FencedOut
from diloco.membership.lease import Lease
from diloco.membership.observer import Observer
from diloco.protocol import manager_keys
from diloco.protocol.manager_records import Name
from diloco.protocol.records import Identity
from diloco.store.base import Store, StoreError
from diloco.torchft.round_records import RoundRecords

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MemberOptions:
    """Identity and timeouts (in seconds) of a member. A quorum waits ``join_timeout_s`` for further
    live members; ``poll_interval_s`` is the longest pause between two requests."""

    replica_id: str
    rank: int
    world_size: int
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    join_timeout_s: float
    poll_interval_s: float
    majority_guard: bool = True


class Peers:
    """Keeps the lease of the process ``me`` and observes the leases of all members."""

    def __init__(
        self,
        store: Store,
        me: Identity,
        options: MemberOptions,
        *,
        records: RoundRecords,
        clock: Clock,
    ) -> None:
        self.me = me
        self._options = options
        self._records = records
        self._clock = clock
        self.lease = Lease(
            store,
            me,
            clock=clock,
            interval_s=options.heartbeat_interval_s,
            heartbeat_timeout_s=options.heartbeat_timeout_s,
            device="",
        )
        self.observer = Observer(
            store,
            clock=clock,
            timeout_s=options.heartbeat_timeout_s,
            gaps=lambda: self.lease.gaps,
        )
        self._replicas: dict[int, str] = {me.replica: options.replica_id}
        self._look_lock = threading.Lock()
        self._next_look_s = clock.monotonic() + options.heartbeat_interval_s

    def check_fence(self) -> None:
        """Raise :class:`~diloco.errors.FencedOut` if a newer process of this member has started."""
        if newer := self.observer.newer_process(self.me):
            if not self.lease.fenced:
                log.error("%s is fenced out by incarnation %s", self.me, newer)
            self.lease.fenced = True
        if self.lease.fenced:
            raise FencedOut(
                f"a newer process of replica {self._options.replica_id!r}, rank "
                f"{self._options.rank}, has started: this one is no longer a member and must end"
            )

    def end(self) -> None:
        """Write the last heartbeat, which shows that this process has left."""
        try:
            self.lease.end("left")
        except StoreError as error:
            log.error("%s could not write its last heartbeat: %s", self.me, error)

    def look(self, *, at_once: bool = False) -> bool:
        """Read the leases, at most once per heartbeat interval; return whether they were read."""
        now_s = self._clock.monotonic()
        with self._look_lock:
            if not at_once and now_s < self._next_look_s:
                return False
            self._next_look_s = now_s + self._options.heartbeat_interval_s
        self.observer.look()
        return True

    def live(self) -> frozenset[int]:
        """Return the numbers of the live members, including this one."""
        return self.observer.live() | {self.me.replica}

    def is_gone(self, process: Identity) -> bool:
        """Return whether another process has ended, died or been replaced."""
        return process != self.me and self.observer.is_gone(process)

    def replicas_of(self, members: Iterable[int]) -> Mapping[int, str]:
        """Return the replica of each member; each name is read once."""
        for member in members:
            if member not in self._replicas:
                name = self._records.find(manager_keys.name(member), Name)
                if name is not None:
                    self._replicas[member] = name.replica_id
        return self._replicas

    def absent(self, joined: Iterable[int]) -> str:
        """Describe the healthy replicas that have not joined, for the message of a timeout."""
        names = self.replicas_of(live := self.observer.live())
        absent = sorted({names.get(m, str(m)) for m in live.difference(joined)})
        if not absent:
            return ""
        guard = ""
        if self._options.majority_guard:
            guard = (
                "; more than half of the healthy replicas, and one with the newest committed "
                "state, must join (majority_guard)"
            )
        return f"; healthy but not joining: {', '.join(absent)}{guard}"
