"""Replicas whose next heartbeat is missing are suspected before they count as dead."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diloco.membership.observer import ASKED_ROUNDS, Observer
from diloco.store.base import LocalStore
from tests.diloco.clocks import ManualClock
from tests.diloco.membership.lease_harness import ME, TIMEOUT_S, CalmReplica, beat, write


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def calm(tmp_path: Path) -> CalmReplica:
    return CalmReplica(LocalStore(tmp_path))


def test_a_replica_is_suspected_after_half_of_the_timeout(store: LocalStore) -> None:
    clock = ManualClock()
    observer = Observer(store, clock=clock, timeout_s=10)
    write(store, beat())
    observer.look()
    clock.now_s = 4.9
    assert observer.suspected() == frozenset()
    clock.now_s = 5.0
    assert observer.suspected() == observer.working_towards(3) == {7}
    write(store, beat(count=2))
    observer.look()
    assert observer.suspected() == frozenset()
    clock.now_s = 15.0
    assert observer.suspected() == frozenset(), "dead replicas are not suspected"


@pytest.mark.parametrize(
    ("uptime_s", "is_suspected"),
    [
        (160.0, False),  # written just now
        (155.1, False),
        (155.0, True),  # written 5 s ago
        (70.0, True),  # written 20 s after the first, then the process died
        (1e12, False),  # a process cannot be newer than now
        (-1e12, True),
        (None, False),
    ],
)
def test_a_changed_lease_can_be_old(
    store: LocalStore, uptime_s: float | None, is_suspected: bool
) -> None:
    clock = ManualClock()
    observer = Observer(store, clock=clock, timeout_s=10)
    write(store, beat(uptime_s=50.0))
    observer.look()
    clock.now_s = 110.0
    write(store, beat(count=2, uptime_s=uptime_s))
    observer.look()
    assert observer.live() == {7}
    assert observer.suspected() == ({7} if is_suspected else frozenset())


def test_an_awaited_replica_is_suspected_after_half_of_the_timeout(calm: CalmReplica) -> None:
    assert calm.is_live()
    calm.clock.sleep(10.0)
    calm.observer.ask([ME.replica])
    calm.clock.sleep(TIMEOUT_S / 2 - 0.1)
    assert calm.is_live() and not calm.observer.suspected()
    calm.clock.sleep(0.1)
    assert calm.is_live() and calm.observer.suspected() == {ME.replica}
    calm.lease.beat()
    assert calm.is_live() and not calm.observer.suspected()


@pytest.mark.parametrize(("age_s", "is_suspected"), [(22.4, False), (22.5, True)])
def test_a_calm_replica_that_died_before_the_look_is_suspected_at_once(
    calm: CalmReplica, age_s: float, is_suspected: bool
) -> None:
    assert calm.is_live()
    calm.clock.sleep(100.0)
    calm.lease.beat()
    calm.clock.sleep(age_s)
    assert calm.is_live()
    calm.observer.ask([ME.replica])
    assert bool(calm.observer.suspected()) == is_suspected


class MeetingDict(dict[int, float]):
    """Two threads that remove the same item meet before they do."""

    def __init__(self, items: dict[int, float]) -> None:
        super().__init__(items)
        self._both = threading.Barrier(2)

    def _meet(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(60)

    def __delitem__(self, key: int) -> None:
        self._meet()
        super().__delitem__(key)

    def pop(self, key: int, *default: Any) -> Any:
        self._meet()
        return super().pop(key, *default)


def test_two_exchanges_forget_the_same_round(store: LocalStore) -> None:
    observer = Observer(store, clock=ManualClock(), timeout_s=TIMEOUT_S)
    observer._asked_s = MeetingDict(dict.fromkeys(range(ASKED_ROUNDS + 1), 0.0))
    with ThreadPoolExecutor(2) as pool:
        for asking in [pool.submit(observer.ask, frozenset()) for _ in range(2)]:
            asking.result()
    assert len(observer._asked_s) == ASKED_ROUNDS
