"""Managers that join late, die and return: the state from which they heal or resume."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.errors import ReplicaError
from diloco.manager import Manager
from diloco.protocol import manager_keys
from diloco.protocol.manager_branches import Line, line_before
from diloco.protocol.manager_keys import Saved
from diloco.protocol.manager_records import Quorum
from diloco.protocol.manager_rounds import ConfigMismatch
from diloco.torchft import state_store
from diloco.torchft.quorum_client import QuorumRequest
from tests.diloco.manager_harness import Harness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.close()


class Trainee:
    """A weight that every committed step lowers by the mean gradient, under a Manager."""

    def __init__(self, harness: Harness, replica: int, weight: float, **keywords: Any) -> None:
        self.weight = torch.tensor([weight])
        self.loads = 0
        self.manager: Manager = harness.make(
            replica, load_state_dict=self.load, state_dict=self.save, **keywords
        )

    def save(self) -> dict[str, Any]:
        return {"weight": self.weight, "group": {"betas": (0.9, 0.95), 0: None}}

    def load(self, state: dict[str, Any]) -> None:
        assert state["group"] == {"betas": (0.9, 0.95), 0: None}
        self.weight.copy_(state["weight"])
        self.loads += 1

    def step(self, gradient: float, **how: Any) -> bool:
        self.manager.start_quorum(**how)
        mean = torch.tensor([gradient])
        self.manager.allreduce(mean).wait()
        self.mean = mean.item()
        if committed := self.manager.should_commit():
            self.weight -= mean
        return committed

    @property
    def state(self) -> tuple[int, float]:
        return self.manager.current_step(), self.weight.item()


def both(harness: Harness, first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
    return harness.together(first, second)


@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_all_members_start_with_the_first_members_weights(
    harness: Harness, use_async_quorum: bool
) -> None:
    options = {"min_replica_size": 2, "use_async_quorum": use_async_quorum}
    a = Trainee(harness, 0, 10.0, **options)
    b = Trainee(harness, 1, 20.0, **options)
    assert both(harness, lambda: a.step(1.0), lambda: b.step(3.0)) == [True, True]
    # A replica that heals during a step used other weights, so it contributes zeros.
    expected = 10.0 - (0.5 if use_async_quorum else 2.0)
    assert a.state == b.state == (1, expected)
    assert (a.loads, b.loads) == (0, 1)
    assert both(harness, lambda: a.step(1.0), lambda: b.step(3.0)) == [True, True]
    assert a.state == b.state == (2, expected - 2.0)
    assert (a.loads, b.loads) == (0, 1)


def test_without_init_sync_members_keep_their_weights(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0, min_replica_size=2, init_sync=False)
    b = Trainee(harness, 1, 20.0, min_replica_size=2, init_sync=False)
    assert both(harness, lambda: a.step(1.0), lambda: b.step(3.0)) == [True, True]
    assert (a.state, b.state) == ((1, 8.0), (1, 18.0))


@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_a_late_replica_heals_from_a_participant(harness: Harness, use_async_quorum: bool) -> None:
    options = {"use_async_quorum": use_async_quorum}
    a = Trainee(harness, 0, 10.0, **options)
    assert [a.step(1.0), a.step(1.0)] == [True, True]
    b = Trainee(harness, 1, 20.0, **options)
    b_requested = threading.Event()

    def go_on() -> bool:
        b_requested.wait(600)
        return a.step(2.0)

    def come() -> bool:
        ask = b.manager._session._ask

        def asking(what: Any) -> Any:
            join = ask(what)
            b_requested.set()
            return join

        b.manager._session._ask = asking  # type: ignore[method-assign]
        return b.step(4.0)

    assert both(harness, go_on, come) == [True, True]
    assert b.loads == 1
    assert a.state == b.state == (3, 8.0 - (2.0 if use_async_quorum else 3.0))
    assert b.manager.batches_committed() == a.manager.batches_committed()


def test_a_replica_that_is_behind_does_not_count_until_it_has_healed(harness: Harness) -> None:
    """An asynchronous quorum of two, one of them behind: too few participate."""
    options = {"use_async_quorum": True, "min_replica_size": 2}
    a, b = Trainee(harness, 0, 10.0, **options), Trainee(harness, 1, 10.0, **options)
    both(harness, lambda: a.step(1.0), lambda: b.step(1.0))
    b.manager.shutdown()
    again = Trainee(harness, 1, 99.0, **options)
    assert both(harness, lambda: a.step(1.0), lambda: again.step(1.0)) == [False, False]
    assert again.state == a.state
    assert both(harness, lambda: a.step(1.0), lambda: again.step(1.0)) == [True, True]
    assert again.state == a.state


def test_an_unserialisable_state_is_an_error(harness: Harness) -> None:
    options = {"min_replica_size": 2, "load_state_dict": lambda state: None}
    a = harness.make(0, state_dict=lambda: {"model": object()}, **options)
    b = harness.make(1, **options)

    def heals() -> bool:
        b.start_quorum()
        return b.should_commit()

    def gives() -> None:
        try:
            a.start_quorum()
        finally:
            a.shutdown()

    with pytest.raises(TypeError, match=r"state\.user\.default\.model: expected plain values"):
        harness.together(gives, heals)


def test_a_state_without_a_registered_key_is_refused(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0, min_replica_size=2)
    b = Trainee(harness, 1, 20.0, min_replica_size=2)
    b.manager.register_state_dict_fn("more", lambda state: None, dict)
    assert both(harness, lambda: a.step(1.0), lambda: b.step(1.0)) == [False, False]
    error = b.manager.errored()
    assert error is not None
    assert isinstance(error.original_exception, ReplicaError)
    assert "found none of ['more']" in str(error)


def test_a_shrink_only_quorum_admits_no_member(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0)
    assert a.step(1.0)
    b = Trainee(harness, 1, 20.0)
    mode = "async_quorum=False world_size_mode=DYNAMIC min_replica_size=1 world_size=1"
    asking = QuorumRequest(
        step=0, min_replicas=1, init_sync=True, shrink_only=False, allow_heal=True, mode=mode
    )
    b.manager._session._ask(asking)
    assert a.step(1.0, shrink_only=True)
    assert a.manager.num_participants() == 1
    b.manager.shutdown()


def test_without_healing_a_member_stays_behind(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0, min_replica_size=1)
    a.manager.load_state_dict({"step": 5, "batches_committed": 5})
    b = Trainee(harness, 1, 20.0, min_replica_size=1)
    results = both(
        harness, lambda: a.step(1.0, allow_heal=False), lambda: b.step(3.0, allow_heal=False)
    )
    assert results == [True, True]
    assert a.state == (6, 9.0)
    assert b.state == (1, 19.0)  # the mean contains only a
    assert not b.manager.is_participating()


def test_a_group_resumes_after_all_replicas_died(harness: Harness) -> None:
    options = {"min_replica_size": 2, "save_every": 2}
    a, b = Trainee(harness, 0, 10.0, **options), Trainee(harness, 1, 20.0, **options)
    for _ in range(3):  # the state of step 2 is saved when the third begins
        assert both(harness, lambda: a.step(1.0), lambda: b.step(1.0)) == [True, True]
    for member in (a, b):
        member.manager.shutdown()
    assert saved_steps(harness) == [2]

    a, b = Trainee(harness, 0, 0.0, **options), Trainee(harness, 1, 0.0, **options)
    assert both(harness, lambda: a.step(1.0), lambda: b.step(1.0)) == [True, True]
    assert a.state == b.state == (3, 7.0)
    assert a.manager.batches_committed() == 6


def test_a_manager_with_a_loaded_step_does_not_resume(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0, save_every=1)
    assert [a.step(1.0), a.step(1.0)] == [True, True]
    a.manager.shutdown()
    again = Trainee(harness, 0, 50.0, save_every=0)
    again.manager.load_state_dict({"step": 7, "batches_committed": 7})
    assert again.step(1.0)
    assert again.state == (8, 49.0)


def test_the_newest_saved_states_are_kept(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0, save_every=1)
    for _ in range(6):
        assert a.step(1.0)
    assert saved_steps(harness) == [4, 5]
    keys = [info.key for info in harness.store.list(manager_keys.STATES)]
    assert len(keys) == 2 * len([4, 5])


def saved_steps(harness: Harness, ranks: int = 1) -> list[int]:
    """Steps of the complete saved states of the group's line."""
    newest = newest_quorum(harness)
    line = line_before(newest, committed=True)
    return [
        saved.step for saved in state_store.complete_states(harness.store, line, ranks=range(ranks))
    ]


def newest_quorum(harness: Harness) -> Quorum | None:
    result = harness.store.list(manager_keys.QUORUMS)
    return Quorum.from_bytes(harness.store.get(result[-1].key)) if result else None


def test_a_group_resumes_only_from_complete_states(harness: Harness) -> None:
    writer = Trainee(harness, 9, 0.0).manager._session.me
    for step, ranks in ((2, (0, 1)), (4, (0,))):
        for rank in ranks:
            saved = Saved(0, step, step)
            state_store.save(
                harness.store, rank, {"at": step}, saved=saved, writer=writer, wall_s=5.0
            )
    line = Line(branch=0, head=9)
    assert state_store.complete_states(harness.store, line, ranks=[0, 1]) == [Saved(0, 2, 2)]
    assert state_store.load(harness.store, 1, Saved(0, 2, 2)) == ({"at": 2}, 5.0)


def test_the_state_is_not_read_while_it_changes(harness: Harness) -> None:
    trainee = Trainee(harness, 0, 10.0)
    manager = trainee.manager
    manager.disallow_state_dict_read()
    manager.disallow_state_dict_read()
    read: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: read.append(manager._manager_state_dict()))
    reader.start()
    trainee.weight += 1.0
    assert not read
    manager.allow_state_dict_read()
    manager.allow_state_dict_read()
    reader.join(600)
    counts = {"step": 0, "batches_committed": 0}
    assert read[0]["torchft"] == counts
    weight: Tensor = read[0]["user"]["default"]["weight"]
    assert weight.item() == 11.0


def test_a_state_key_is_registered_once(harness: Harness) -> None:
    manager = harness.make(0)
    with pytest.raises(ValueError, match="expected a new one, found 'default' twice"):
        manager.register_state_dict_fn("default", lambda state: None, dict)


def consider_gone(member: Trainee, other: Trainee) -> None:
    """Let the lease of ``other`` be old in the eyes of ``member``."""
    observer = member.manager._session.peers.observer
    process = other.manager._session.me
    observer.look()
    old = observer._seen[process.replica]
    observer._seen[process.replica] = replace(old, since_s=old.since_s - 1e9, count=-1)
    assert observer.is_gone(process)


def test_a_member_that_was_considered_gone_still_votes(harness: Harness) -> None:
    """It has formed the quorum, so the others did not have to read its lease for that; they read it
    before they decide without its vote."""
    a, b = Trainee(harness, 0, 10.0), Trainee(harness, 1, 10.0)
    assert both(harness, lambda: a.step(1.0), lambda: b.step(1.0)) == [True, True]
    both(harness, a.manager.start_quorum, b.manager.start_quorum)
    consider_gone(a, b)
    b_can_vote = threading.Event()
    look = a.manager._session.peers.observer.look

    def looking(**how: Any) -> None:
        look(**how)
        b_can_vote.set()

    a.manager._session.peers.observer.look = looking  # type: ignore[method-assign]

    def first() -> bool:
        try:
            return a.manager.should_commit()
        finally:
            b_can_vote.set()

    def second() -> bool:
        assert b_can_vote.wait(300)
        return b.manager.should_commit()

    assert both(harness, first, second) == [True, True]


def test_a_member_that_was_considered_gone_can_rejoin(harness: Harness) -> None:
    """The others read its lease again before they ignore its join."""
    a, b = Trainee(harness, 0, 10.0), Trainee(harness, 1, 10.0)
    assert both(harness, lambda: a.step(1.0), lambda: b.step(1.0)) == [True, True]
    consider_gone(a, b)
    assert both(harness, lambda: a.step(1.0), lambda: b.step(1.0)) == [True, True]
    assert a.manager.num_participants() == 2


def test_a_new_member_with_another_mode_does_not_disturb_the_group(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0)
    assert a.step(1.0)
    other = Trainee(
        harness, 1, 10.0, use_async_quorum=True, heartbeat_timeout=timedelta(seconds=50)
    )
    other.manager.start_quorum()
    with pytest.raises(ConfigMismatch, match="expected mode 'async_quorum=False"):
        other.manager.wait_quorum()
    assert a.step(1.0)


def test_a_dead_group_can_restart_with_another_mode(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0)
    assert a.step(1.0)
    a.manager.shutdown()
    other = Trainee(harness, 1, 10.0, use_async_quorum=True)
    assert other.step(1.0)
