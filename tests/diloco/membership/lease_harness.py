"""Leases for tests: single heartbeats, and a calm replica with an observer on the same clock."""

from __future__ import annotations

import dataclasses

from diloco.membership.lease import Lease
from diloco.membership.observer import Observer
from diloco.protocol import keys
from diloco.protocol.records import Heartbeat, Identity
from diloco.store.base import LocalStore
from tests.diloco.clocks import ManualClock

TIMEOUT_S, INTERVAL_S, ROUND = 15.0, 3.0, 4
ME = Identity(replica=1, incarnation="00001-00000000")


def beat(**changes: object) -> Heartbeat:
    first = Heartbeat(
        replica=7,
        incarnation="00001-00000000",
        count=1,
        interval_s=2.0,
        state="computing",
        round=3,
        step=0,
        tokens=0,
        started_wall_s=0.0,
        wall_s=0.0,
    )
    return dataclasses.replace(first, **changes)  # type: ignore[arg-type]


def write(store: LocalStore, a_beat: Heartbeat) -> None:
    store.put(keys.beat(a_beat.replica, a_beat.incarnation), a_beat.to_bytes())


class CalmReplica:
    """A lease whose thread a test replaces, and an observer on the same clock."""

    def __init__(self, store: LocalStore) -> None:
        self.store, self.clock = store, ManualClock()
        self.lease = Lease(
            store,
            ME,
            clock=self.clock,
            interval_s=INTERVAL_S,
            heartbeat_timeout_s=TIMEOUT_S,
            device="cpu",
        )
        self.observer = Observer(store, clock=self.clock, timeout_s=TIMEOUT_S)
        self.lease.update(state="computing", round=ROUND, calm=True)
        self.lease.beat()

    def pass_intervals(self, number: int) -> int:
        """Let time pass; return how many heartbeats were written."""
        before = self.shown().count
        for _ in range(number):
            self.clock.sleep(INTERVAL_S)
            self.lease.beat_if_due()
        return self.shown().count - before

    def shown(self) -> Heartbeat:
        return Heartbeat.read(self.store, keys.beat(ME.replica, ME.incarnation))

    def is_live(self) -> bool:
        self.observer.look()
        return self.observer.live() == {ME.replica}
