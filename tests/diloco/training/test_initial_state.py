"""Waits for a checkpoint end after a bound that follows from the settings, and show their cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from diloco.errors import ReplicaError
from diloco.membership.lease import Lease
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from diloco.training import catch_up, initial_state
from diloco.training.global_state import GlobalState
from diloco.training.initial_state import (
    checkpoint_wait_s,
    first_checkpoint_wait_s,
    first_state,
    newest_state,
)
from diloco.training.local_progress import LocalProgress
from tests.diloco.clocks import ManualClock

MakeGroup = Callable[..., Any]

ME = Identity(replica=1, incarnation="00001-00000000")


def state_of(settings: GroupSettings) -> GlobalState:
    return LocalProgress(ME, settings, Layout(nn.Linear(4, 2)), ManualClock()).state


def test_the_wait_for_a_checkpoint_follows_the_round_timeout() -> None:
    assert checkpoint_wait_s(GroupSettings(round_timeout_s=60.0)) == 900.0
    assert checkpoint_wait_s(GroupSettings(round_timeout_s=7200.0)) == 7200.0


def test_the_wait_for_the_first_checkpoint_follows_the_wait_at_the_start() -> None:
    assert first_checkpoint_wait_s(GroupSettings(round_timeout_s=60.0)) == 900.0
    assert first_checkpoint_wait_s(GroupSettings(start_wait_s=7200.0)) == 7200.0
    together = GroupSettings(start_replicas=2, num_replicas=4, start_wait_s=10.0)
    assert first_checkpoint_wait_s(together) == math.inf, "training starts however late they come"


def test_the_wait_for_an_absent_coordinator_ends(tmp_path: Path) -> None:
    clock, messages = ManualClock(), set[str]()
    with pytest.raises(ReplicaError, match=r"checkpoint 0 of replica 0, .* within 100 s, found no"):
        first_state(
            LocalStore(tmp_path),
            ME,
            state_of(GroupSettings()),
            clock,
            lambda: None,
            committer=lambda: 0,
            wait_s=100.0,
            on_missing=messages.add,
        )
    assert clock.now_s == pytest.approx(100.0, abs=1.0)
    assert messages == {"waiting for checkpoint 0 of replica 0, the coordinator"}


def test_a_replica_that_becomes_the_coordinator_writes_the_first_checkpoint(tmp_path: Path) -> None:
    clock, store = ManualClock(), LocalStore(tmp_path)
    wrote = first_state(
        store,
        ME,
        state_of(GroupSettings()),
        clock,
        lambda: None,
        committer=lambda: ME.replica if clock.now_s > 50.0 else 0,
        wait_s=100.0,
    )
    assert wrote and store.get(keys.checkpoint_manifest(0))
    assert 50.0 < clock.now_s < 100.0


def test_the_wait_for_a_later_checkpoint_ends(tmp_path: Path) -> None:
    layout, clock, messages = Layout(nn.Linear(4, 2)), ManualClock(), set[str]()
    outer = OuterOptimizer(lr=1.0, momentum=0.9, numel=layout.numel)
    with pytest.raises(ReplicaError, match=r"of round 7 or later within 50 s, because it is lost,"):
        newest_state(
            LocalStore(tmp_path),
            layout,
            outer,
            7,
            clock,
            lambda: None,
            why="it is lost",
            wait_s=50.0,
            on_missing=messages.add,
        )
    assert clock.now_s == pytest.approx(50.0, abs=1.0)
    assert messages == {"waiting for a checkpoint of round 7 or later, because it is lost"}


def test_a_replica_without_its_coordinator_shows_that_it_waits_and_ends(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_state, "SHORTEST_WAIT_S", 1.0)
    group = tiny_group(
        num_replicas=2,
        round_timeout_s=50.0,
        heartbeat_timeout_s=40.0,
        grace_s=1.0,
        start_wait_s=1.0,
    )
    shown: list[object] = []
    update = Lease.update

    def watched(lease: Lease, **changes: object) -> None:
        shown.append(changes.get("message"))
        update(lease, **changes)

    monkeypatch.setattr(Lease, "update", watched)
    member = group.start(1, atomic_create=False)
    group.wait()
    assert isinstance(member.error, ReplicaError) and "within 50 s" in str(member.error)
    assert "waiting for checkpoint 0 of replica 0, the coordinator" in shown


def test_a_replica_waits_for_a_checkpoint_for_the_time_in_the_settings(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def watched(*arguments: Any, wait_s: float, **keywords: Any) -> Any:
        waits.append(wait_s)
        return newest_state(*arguments, wait_s=wait_s, **keywords)

    monkeypatch.setattr(catch_up, "newest_state", watched)
    group = tiny_group(num_replicas=1, total_rounds=1, round_timeout_s=4000.0)
    group.start(0)
    group.wait()
    assert waits == [4000.0]
