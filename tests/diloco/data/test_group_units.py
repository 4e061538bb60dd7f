"""Work units of the processes of a group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diloco.clock import Clock
from diloco.data.group_units import Watcher, join_units
from diloco.data.sample_stream import SampleOrder
from diloco.membership.lease import Lease, claim_incarnation
from diloco.membership.observer import Observer
from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from tests.diloco.clocks import ManualClock
from tests.diloco.data.shards import write_shards
from tests.diloco.membership.lease_harness import INTERVAL_S, TIMEOUT_S

SETTINGS = GroupSettings(
    num_replicas=1, batch_size=1, sync_every=2, warmup_steps=0, heartbeat_timeout_s=TIMEOUT_S
)


@dataclass
class OneProcess:
    """The part of a :class:`~diloco.training.group.Group` that work units need."""

    store: LocalStore
    clock: Clock
    lease: Lease
    settings: GroupSettings = SETTINGS

    @property
    def identity(self) -> Identity:
        return self.lease.identity

    def observer(self) -> Observer:
        return Observer(
            self.store, clock=self.clock, timeout_s=TIMEOUT_S, gaps=lambda: self.lease.gaps
        )

    def watch(self, watcher: Watcher) -> None:
        pass


def test_after_a_pause_of_all_processes_no_unit_of_a_live_one_is_taken(tmp_path: Path) -> None:
    store, clock = LocalStore(tmp_path / "run"), ManualClock()
    index = write_shards(LocalStore(tmp_path / "tokens"), tokens=400)
    order = SampleOrder(index, context=4, seed=0)

    def join(replica: int) -> OneProcess:
        lease = Lease(
            store,
            claim_incarnation(store, replica, nonce="0" * 8),
            clock=clock,
            interval_s=INTERVAL_S,
            heartbeat_timeout_s=TIMEOUT_S,
            device="cpu",
        )
        lease.beat()
        return OneProcess(store, clock, lease)

    first, second = join(0), join(1)
    left = join_units(first, index, order, seed=0)(1)[0].position + 1  # of two samples, one is left
    take = join_units(second, index, order, seed=0)
    take(2)
    clock.sleep(10 * TIMEOUT_S)
    taken = take(2)
    second.lease.beat()
    for _ in range(int(TIMEOUT_S / INTERVAL_S)):
        taken += take(2)
        clock.sleep(INTERVAL_S)
        second.lease.beat()
    assert left not in [place.position for place in taken]
    assert left in [place.position for place in take(2)], "the first process has ended"
