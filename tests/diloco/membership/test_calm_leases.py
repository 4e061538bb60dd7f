"""Replicas that no process waits for write few heartbeats, and are still detected in time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from diloco.membership.observer import Gaps, Observer
from diloco.protocol import keys
from diloco.store.base import LocalStore, StoreDenied, StoreUnavailable
from diloco.store.multipart import Data
from tests.diloco.membership.lease_harness import (
    INTERVAL_S,
    ME,
    ROUND,
    TIMEOUT_S,
    CalmReplica,
    write,
)


class BrokenReads(LocalStore):
    def get_range(self, key: str, start: int, length: int) -> bytes:
        raise StoreUnavailable("away")


class RefusingPuts(LocalStore):
    """Records the keys of all puts, and denies them until ``is_open``."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.puts: list[str] = []
        self.is_open = False

    def put(self, key: str, data: Data) -> None:
        self.puts.append(key)
        if not self.is_open:
            raise StoreDenied("denied")
        super().put(key, data)


@pytest.fixture
def calm(tmp_path: Path) -> CalmReplica:
    return CalmReplica(LocalStore(tmp_path))


def test_a_calm_replica_writes_one_heartbeat_per_timeout(calm: CalmReplica) -> None:
    assert calm.pass_intervals(20) == 4
    assert calm.shown().interval_s == TIMEOUT_S
    calm.lease.update(calm=False)
    assert calm.pass_intervals(4) == 4
    assert calm.shown().interval_s == INTERVAL_S


def test_heartbeats_in_the_middle_of_a_long_computation_are_further_apart(
    calm: CalmReplica,
) -> None:
    """A process that begins to wait when they end reads one that is at most a timeout old."""
    calm.lease.update(round=ROUND + 1, ends_s=calm.clock.monotonic() + 4 * TIMEOUT_S)
    assert calm.pass_intervals(1) == 1
    assert calm.shown().interval_s == pytest.approx(3 * TIMEOUT_S - INTERVAL_S)
    assert calm.pass_intervals(13) == 0
    assert calm.pass_intervals(1) == 1
    assert calm.shown().interval_s == TIMEOUT_S
    assert calm.is_live()
    calm.clock.sleep(2 * TIMEOUT_S)
    assert not calm.is_live()


def test_a_replica_in_the_middle_of_a_computation_can_be_awaited(calm: CalmReplica) -> None:
    calm.lease.update(round=ROUND + 1, ends_s=calm.clock.monotonic() + 9 * TIMEOUT_S)
    calm.pass_intervals(1)
    assert calm.is_live()
    calm.clock.sleep(2 * TIMEOUT_S)
    assert calm.is_live() and not calm.observer.suspected()
    calm.observer.ask([ME.replica])
    assert calm.pass_intervals(2) >= 1, "before it is suspected"
    assert calm.shown().interval_s == INTERVAL_S
    calm.is_live()
    calm.clock.sleep(TIMEOUT_S)
    assert not calm.is_live()


def test_a_change_of_state_or_round_is_shown_at_once(calm: CalmReplica) -> None:
    calm.lease.update(round=ROUND + 1)
    assert calm.pass_intervals(1) == 1
    assert calm.shown().round == ROUND + 1
    assert calm.pass_intervals(1) == 0


def test_an_awaited_replica_writes_every_heartbeat_until_its_next_round(calm: CalmReplica) -> None:
    calm.observer.look()
    calm.observer.ask([ME.replica])
    assert calm.pass_intervals(5) == 5
    assert calm.shown().interval_s == INTERVAL_S
    calm.lease.update(round=ROUND + 1)
    assert calm.pass_intervals(6) == 2  # the change, and one after the timeout


def test_a_replica_that_has_not_looked_can_be_awaited(calm: CalmReplica) -> None:
    assert calm.lease.can_be_awaited
    calm.pass_intervals(1)
    assert not calm.lease.can_be_awaited
    calm.store.put(keys.awaited(ROUND), b"{}")
    calm.pass_intervals(1)
    assert calm.lease.can_be_awaited


def test_a_replica_that_has_contributed_is_not_awaited(calm: CalmReplica) -> None:
    calm.store.put(keys.awaited(ROUND), b"{}")
    calm.lease.update(state="waiting")
    assert calm.pass_intervals(1) == 1
    assert calm.pass_intervals(4) == 0


@pytest.mark.parametrize("changes", [{"state": "syncing"}, {"blocked": ROUND}])
def test_a_replica_that_needs_help_writes_every_heartbeat(
    calm: CalmReplica, changes: dict[str, object]
) -> None:
    calm.lease.update(**changes)
    assert calm.pass_intervals(4) == 4


def test_a_replica_that_cannot_read_whether_it_is_awaited_beats(tmp_path: Path) -> None:
    assert CalmReplica(BrokenReads(tmp_path)).pass_intervals(3) == 3


def test_a_failed_heartbeat_is_repeated_after_an_interval(
    calm: CalmReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm.pass_intervals(4)
    put, failures = calm.store.put, iter([True, True])

    def fail_twice(key: str, data: bytes) -> None:
        if next(failures, False):
            raise StoreUnavailable("away")
        put(key, data)

    monkeypatch.setattr(calm.store, "put", fail_twice)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            calm.pass_intervals(1)
    assert calm.pass_intervals(1) > 0
    assert calm.pass_intervals(1) == 0


def test_a_calm_process_that_reads_alone_has_no_gap(calm: CalmReplica) -> None:
    calm.pass_intervals(4)  # 12 s without a heartbeat, more than half the timeout
    assert calm.lease.gaps == Gaps()
    calm.clock.sleep(TIMEOUT_S)
    assert calm.lease.gaps == Gaps(1, calm.clock.monotonic())


def test_an_awaited_replica_that_is_dead_expires_after_the_timeout(calm: CalmReplica) -> None:
    assert calm.is_live()
    calm.clock.sleep(10.0)
    calm.observer.ask([ME.replica])
    calm.clock.sleep(TIMEOUT_S - 0.1)
    assert calm.is_live()
    calm.clock.sleep(0.1)
    assert not calm.is_live()


def test_without_a_request_a_calm_lease_expires_after_its_longer_interval(
    calm: CalmReplica,
) -> None:
    assert calm.is_live()
    calm.clock.sleep(2 * TIMEOUT_S - 0.1)
    assert calm.is_live()
    calm.observer.ask([ME.replica])  # cannot prolong it
    calm.clock.sleep(0.1)
    assert not calm.is_live()


def test_a_dead_replica_stays_dead_in_later_rounds(calm: CalmReplica) -> None:
    assert calm.is_live()
    calm.observer.ask([ME.replica])
    calm.clock.sleep(TIMEOUT_S)
    assert not calm.is_live()
    calm.observer._asked_s.clear()  # as in a round of which it knows nothing
    assert not calm.is_live()
    calm.lease.beat()
    assert calm.is_live()


def test_a_request_is_written_once_a_round_and_for_calm_replicas_only(calm: CalmReplica) -> None:
    calm.lease.update(calm=False)
    calm.lease.beat()
    calm.observer.look()
    calm.observer.ask([ME.replica, 99])
    assert not calm.store.list(keys.ROUNDS)
    calm.lease.update(calm=True)
    calm.lease.beat()
    calm.observer.look()
    calm.observer.ask([ME.replica])
    calm.store.delete([keys.awaited(ROUND)])
    calm.observer.ask([ME.replica])
    assert not calm.store.list(keys.ROUNDS)


def test_a_store_that_refuses_a_request_for_heartbeats_ends_no_round(
    calm: CalmReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked again after the timeout. Until then the lease expires after its longer interval:
    the replica does not know that it is awaited."""
    refusing = RefusingPuts(calm.store.root)
    observer = calm.observer = Observer(
        calm.store, clock=calm.clock, timeout_s=TIMEOUT_S, unretried=refusing
    )
    assert calm.is_live()
    for _ in range(3):
        observer.ask([ME.replica])
        calm.clock.sleep(TIMEOUT_S / 3 - 0.1)
    assert refusing.puts == [keys.awaited(ROUND)]
    assert "cannot ask for heartbeats in round 4, will retry: denied" in caplog.text
    calm.clock.sleep(0.3)
    assert calm.is_live(), "nothing has asked it"
    refusing.is_open = True
    observer.ask([ME.replica])
    assert refusing.puts == [keys.awaited(ROUND)] * 2
    calm.clock.sleep(TIMEOUT_S - 0.1)
    assert calm.is_live()
    calm.clock.sleep(0.1)
    assert not calm.is_live()


@pytest.mark.parametrize("interval_s", [1e12, float("inf"), float("nan")])
def test_a_lease_cannot_claim_a_longer_interval(calm: CalmReplica, interval_s: float) -> None:
    longer = dataclasses.replace(calm.shown(), count=99, interval_s=interval_s)
    write(calm.store, longer)
    assert calm.is_live()
    calm.clock.sleep(4 * TIMEOUT_S)
    assert not calm.is_live()


def test_a_round_in_progress_asks_for_each_round_that_a_late_replica_works_towards(
    calm: CalmReplica,
) -> None:
    calm.lease.update(round=ROUND - 1)
    calm.lease.beat()
    calm.observer.look()
    calm.observer.ask([ME.replica])
    assert [info.key for info in calm.store.list(keys.ROUNDS)] == [keys.awaited(ROUND - 1)]
    assert keys.kind_of(keys.awaited(ROUND)) == keys.Kind.AWAITED
