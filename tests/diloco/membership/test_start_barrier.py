"""The start barrier before round 1."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco.membership.lease import Lease
from diloco.membership.observer import Observer
from diloco.membership.start_barrier import wait_for_start
from diloco.protocol import keys
from diloco.protocol.records import Heartbeat
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore, MissingKey, Store

MakeGroup = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # the lease of a killed member
)


def lease_of(store: Store, replica: int) -> Heartbeat | None:
    listed = [info.key for info in store.list(keys.member(replica)) if keys.parse_beat(info.key)]
    try:
        return Heartbeat.from_bytes(store.get(max(listed))) if listed else None
    except MissingKey:
        return None


def until_message(group: Any, replica: int, text: str) -> Heartbeat:
    """The lease of a replica, once its message contains ``text``."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        beat = lease_of(group.store, replica)
        if beat is not None and text in beat.message:
            return beat
    raise AssertionError(f"replica {replica} never showed {text!r}")


def test_no_replica_steps_before_enough_are_ready(
    tiny_group: MakeGroup,
) -> None:
    group = tiny_group(
        num_replicas=4, start_replicas=3, start_wait_s=0.0, heartbeat_timeout_s=40.0, grace_s=0.0
    )
    first, dying = group.start(0), group.start(1)
    beat = until_message(group, 0, "2 of 4 replicas are ready, training starts with 3")
    assert (beat.state, beat.step) == ("waiting", 0)
    dying.store.dead = True
    until_message(group, 0, "1 of 4")
    second = group.start(2)
    until_message(group, 2, "2 of 4")
    assert [member.steps for member in group.members] == [0, 0, 0]
    third = group.start(3)
    group.wait(first, second, third)
    group.assert_agreed(first, second, third)
    assert 1 not in [c.replica for commit in group.commits() for c in commit.contributors]


def test_a_replica_that_joins_after_the_first_step_does_not_wait(tiny_group: MakeGroup) -> None:
    """Even if fewer replicas are alive than must start together."""
    group = tiny_group(
        num_replicas=3, start_replicas=3, start_wait_s=0.0, heartbeat_timeout_s=40.0, grace_s=0.0
    )
    begun, come = threading.Event(), threading.Event()

    def hold(member: Any, joined: Any) -> None:
        if member.replica == 0:  # not one that dies: its lease can still show that it waits
            begun.set()
        assert come.wait(600)

    first, *dying = [group.start(replica, on_step=hold) for replica in range(3)]
    assert begun.wait(600)
    for member in dying:
        member.store.dead = True
    late = group.start(3, on_step=lambda member, joined: come.set())
    group.wait(first, late)
    group.assert_agreed(first, late)
    assert late.steps > 0


def test_an_expired_lease_shows_that_training_has_started(tiny_group: MakeGroup) -> None:
    group = tiny_group()
    observer = Observer(group.store, clock=group_clock(), timeout_s=1e-9)
    base = Heartbeat(
        replica=1,
        incarnation="00001-00000000",
        count=1,
        interval_s=2.0,
        state="waiting",
        round=1,
        step=0,
        tokens=0,
        started_wall_s=0.0,
        wall_s=0.0,
    )
    for changes, begun in (
        ({}, False),
        ({"state": "computing"}, True),
        ({"state": "left"}, False),
        ({"state": "failed", "step": 1}, True),
        ({"role": "syncer", "step": 1}, False),
    ):
        beat = replace(base, **changes)
        group.store.put(keys.beat(1, base.incarnation), beat.to_bytes())
        observer = Observer(group.store, clock=group_clock(), timeout_s=1e-9)
        observer.look()
        assert observer.begun() is begun, changes
        assert observer.live() == frozenset()


def test_a_run_whose_first_records_are_packed_has_begun(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(keys.commit(1), b"{}")
    lease = SimpleNamespace(beat=lambda: None, identity=SimpleNamespace(replica=0))
    observer = SimpleNamespace(look=lambda: None, begun=lambda: False)
    wait_for_start(
        store,
        GroupSettings(num_replicas=3, start_replicas=3),
        lease=cast(Lease, lease),
        observer=cast(Observer, observer),
        clock=group_clock(),
        check=lambda: None,
    )


def group_clock() -> Any:
    class Now:
        def wall(self) -> float:
            return 0.0

        def monotonic(self) -> float:
            return time.monotonic()

        def sleep(self, seconds: float) -> None:
            raise AssertionError("expected no wait")

    return Now()
