"""A process that was paused, or cut off from the store, counts no other as dead because of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.membership.free_number import claim_free_number
from diloco.membership.lease import claim_incarnation
from diloco.membership.observer import EXCUSED_GAPS, Gaps, Observer
from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore, ObjectInfo
from tests.diloco.clocks import ManualClock
from tests.diloco.membership.lease_harness import TIMEOUT_S, beat, write


class Observed:
    """The lease of replica 7, and an observer with gaps on the same clock."""

    def __init__(self, store: LocalStore) -> None:
        self.store, self.clock, self.gaps = store, ManualClock(), Gaps()
        self.observer = Observer(
            store, clock=self.clock, timeout_s=TIMEOUT_S, gaps=lambda: self.gaps
        )
        write(store, beat())

    def pause(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        self.gaps = Gaps(self.gaps.count + 1, self.clock.monotonic())

    def is_live(self) -> bool:
        self.observer.look()
        return self.observer.live() == {7}


@pytest.fixture
def observed(tmp_path: Path) -> Observed:
    return Observed(LocalStore(tmp_path))


def test_after_a_gap_a_lease_has_the_timeout_again(observed: Observed) -> None:
    assert observed.is_live()
    observed.pause(10 * TIMEOUT_S)
    assert observed.is_live()
    observed.clock.sleep(TIMEOUT_S - 0.1)
    assert observed.is_live()
    observed.clock.sleep(0.1)
    assert not observed.is_live()


def test_gaps_excuse_one_heartbeat_a_few_times_only(observed: Observed) -> None:
    """Heartbeats over a slow connection are a gap each time."""
    for count in range(2):  # a live process is excused again after its next heartbeat
        write(observed.store, beat(count=2 + count))
        assert observed.is_live()
        for _ in range(EXCUSED_GAPS):
            observed.pause(TIMEOUT_S)
            assert observed.is_live()
    observed.pause(TIMEOUT_S)
    assert not observed.is_live()


def test_a_gap_makes_no_expired_lease_live_again(observed: Observed) -> None:
    assert observed.is_live()
    observed.clock.sleep(TIMEOUT_S)
    assert not observed.is_live()
    observed.pause(TIMEOUT_S)
    assert not observed.is_live()
    write(observed.store, beat(count=2))
    assert observed.is_live()


def test_a_process_is_gone_by_what_was_read_last(observed: Observed) -> None:
    """A time in which nothing was read is no silence of the other process."""
    assert observed.is_live()
    observed.clock.sleep(TIMEOUT_S)
    write(observed.store, beat(count=2))
    assert not observed.observer.live()
    assert not observed.observer.is_gone(Identity(replica=7, incarnation="00001-00000000"))
    observed.observer.look()
    assert observed.observer.live()


@pytest.mark.parametrize("has_lease", [True, False])
def test_slow_listings_do_not_keep_the_number_of_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_lease: bool
) -> None:
    """Each is a gap of the process that waits for a number."""
    store, clock = LocalStore(tmp_path), ManualClock()
    settings = GroupSettings(num_replicas=1, max_replicas=1, heartbeat_timeout_s=TIMEOUT_S)
    dead = claim_incarnation(store, 0, nonce="0" * 8)
    if has_lease:
        write(store, beat(replica=0, incarnation=dead.incarnation))
    listed = store.list

    def slow(prefix: str) -> list[ObjectInfo]:
        assert clock.now_s < 100 * TIMEOUT_S, "it waits for ever"
        clock.sleep(TIMEOUT_S)
        return list(listed(prefix))

    monkeypatch.setattr(store, "list", slow)
    taken = claim_free_number(store, settings, nonce="1" * 8, clock=clock)
    assert taken.replica == 0 and taken.incarnation != dead.incarnation
