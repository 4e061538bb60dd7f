"""Branches of the Manager's rounds: rollbacks, torn saves, members left behind, the majority."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.errors import FencedOut, ReplicaError
from diloco.manager import Manager
from diloco.protocol import manager_keys
from diloco.protocol.manager_branches import (
    UNKNOWN,
    AbandonedBranch,
    Line,
    StateId,
    line_before,
    starting_state,
)
from diloco.protocol.manager_keys import Saved
from diloco.protocol.manager_records import Quorum, Seat, Segment, Verdict
from diloco.protocol.records import Identity
from diloco.torchft import quorum_client, state_store
from tests.diloco.manager_world import World, step
from tests.diloco.torchft.test_manager_recovery import Trainee, newest_quorum, saved_steps

ME = Identity(replica=1, incarnation="00001-00000001")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def train(trainee: Trainee, steps: int) -> None:
    for _ in range(steps):
        assert trainee.step(1.0)


def rolled_back(world: World, to_step: int, weight: float, **keywords: Any) -> Trainee:
    trainee = Trainee(world, 0, weight, **keywords)
    trainee.manager.load_state_dict({"step": to_step, "batches_committed": to_step})
    return trainee


# -- rollbacks and saved states ------------------------------------------------------------------


def test_after_a_rollback_the_group_resumes_the_new_branch(world: World) -> None:
    first = Trainee(world, 0, 100.0, save_every=1)
    train(first, 8)
    first.manager.shutdown()
    second = rolled_back(world, 2, 50.0, save_every=1)
    train(second, 3)
    second.manager.shutdown()
    third = Trainee(world, 0, 0.0, save_every=1)
    train(third, 1)
    # Saved as step 4 begins and committed step 5: what was saved last is the state after step 4.
    assert third.state == (5, 50.0 - 3.0)


def test_a_rollback_saves_at_once_and_so_is_never_without_a_state(world: World) -> None:
    first = Trainee(world, 0, 100.0, save_every=2)
    train(first, 7)
    first.manager.shutdown()
    second = rolled_back(world, 3, 50.0, save_every=100)
    train(second, 1)
    second.manager.shutdown()
    third = Trainee(world, 0, 0.0, save_every=100)
    train(third, 1)
    assert third.state == (4, 49.0)


def test_saved_states_of_an_abandoned_branch_are_swept_later(world: World) -> None:
    first = Trainee(world, 0, 100.0, save_every=1)
    train(first, 8)
    first.manager.shutdown()
    second = rolled_back(world, 2, 50.0, save_every=1)
    train(second, 1)
    assert saved_steps(world) == [2]
    assert len(world.store.list(manager_keys.STATES)) > 2  # with one of its own, the old are kept
    train(second, 2)
    assert saved_steps(world) == [3, 4]
    parsed = [manager_keys.parse_saved(i.key) for i in world.store.list(manager_keys.STATES)]
    assert {found[0].step for found in parsed if found} == {3, 4}


def save(world: World, saved: Saved, *ranks: int) -> None:
    for rank in ranks:
        state_store.save(world.store, rank, {"at": saved.step}, saved=saved, writer=ME, wall_s=1.0)


def test_ranks_of_different_branches_are_no_complete_save(world: World) -> None:
    save(world, Saved(0, 8, 8), 0)
    save(world, Saved(5, 8, 8), 1)
    for line in (Line(0, 9), Line(5, 9, (Segment(branch=0, until=4),)), Line(5, 9)):
        assert state_store.complete_states(world.store, line, ranks=[0, 1]) == []


def test_a_process_that_was_left_behind_deletes_nothing_of_the_new_branch(world: World) -> None:
    save(world, Saved(0, 2, 2), 0)
    save(world, Saved(0, 4, 4), 0)
    save(world, Saved(0, 6, 6), 0)
    save(world, Saved(7, 8, 5), 0)
    state_store.sweep(world.store, Line(0, 6), ranks=[0])
    left = {manager_keys.parse_saved(i.key) for i in world.store.list(manager_keys.STATES)}
    assert {found[0] for found in left if found} == {Saved(0, 4, 4), Saved(0, 6, 6), Saved(7, 8, 5)}


def test_a_state_saved_by_an_earlier_release_is_resumed(world: World) -> None:
    trainee = Trainee(world, 0, 9.0, save_every=1)
    state = {"user": {"default": trainee.save()}, "torchft": {"step": 6, "batches_committed": 6}}
    state_store.save(world.store, 0, state, saved=Saved(0, 0, 6), writer=ME, wall_s=0.0)
    keys = [info.key for info in world.store.list(manager_keys.STATES)]
    assert keys[-1] == "manager/states/00000006/00000.json"
    old = Quorum(n=7, step=6, mode="", seats=(), writer=ME)
    for n in range(1, 8):
        world.store.put(manager_keys.quorum(n), old.to_bytes())
    trainee.manager._session.n = 7
    trainee.manager._session.quorum = old
    trainee.manager._session._is_new = False
    train(trainee, 1)
    assert trainee.state == (7, 8.0)


# -- the line ------------------------------------------------------------------------------------


def test_a_line_contains_what_its_segments_say() -> None:
    line = Line(20, 25, (Segment(branch=0, until=7), Segment(branch=9, until=12)))
    assert line.contains(0, 7)
    assert line.contains(9, 12)
    assert line.contains(20, 25)
    assert not line.contains(0, 8)
    assert not line.contains(9, 13)
    assert not line.contains(13, 14)
    assert not line.contains(20, 26)
    assert not line.contains(UNKNOWN, 0)


def test_a_branch_continues_the_line_up_to_the_state_that_it_begins_from() -> None:
    line = Line(20, 25, (Segment(branch=0, until=7), Segment(branch=9, until=12)))
    forked = line.forked_from(StateId(9, 11, 8), 30)
    assert forked == Line(30, 0, (Segment(branch=0, until=7), Segment(branch=9, until=11)))
    assert line.forked_from(StateId(UNKNOWN, 0, 8), 30) == Line(30)


def test_a_further_state_of_an_abandoned_branch_is_not_the_newest() -> None:
    line = Line(5, 8, (Segment(branch=0, until=3),))
    found = starting_state({"a": StateId(0, 4, 90), "b": StateId(5, 8, 6)}, line)
    assert found == StateId(5, 8, 6)
    with pytest.raises(AbandonedBranch, match="Restart these processes"):
        starting_state({"a": StateId(0, 4, 90)}, line)


def test_a_member_of_an_abandoned_branch_heals_though_its_step_is_the_same(world: World) -> None:
    a, b = Trainee(world, 0, 10.0), Trainee(world, 1, 20.0)
    world.together(lambda: a.step(1.0), lambda: b.step(1.0))
    b.manager._recovery.branch, b.manager._recovery.head = 7, 9  # another state of step 1
    b.weight += 5.0
    world.together(lambda: a.step(1.0), lambda: b.step(1.0))
    assert a.state == b.state == (2, 8.0)
    assert b.loads == 2


def test_a_heal_is_loaded_though_should_commit_was_not_called(world: World) -> None:
    options = {"use_async_quorum": True, "min_replica_size": 2}
    a, b = Trainee(world, 0, 10.0, **options), Trainee(world, 1, 20.0, **options)
    for trainee in (a, b):
        trainee.manager._timeout_s = 20.0

    def gives_up() -> bool:
        b.manager.start_quorum()
        b.manager.wait_quorum()
        return b.step(1.0)

    def tries() -> bool:
        return a.step(1.0) or a.step(1.0)

    assert world.together(tries, gives_up) == [True, True]
    assert b.state == a.state


# -- a round that the group went on without ------------------------------------------------------


def test_a_round_that_was_closed_commits_nothing_more(world: World) -> None:
    a = Trainee(world, 0, 10.0)
    a.manager.start_quorum()
    assert a.manager._session._close(1) is False
    assert not a.manager.should_commit()
    assert not a.manager.should_commit()  # nor when it asks again
    assert a.state == (0, 10.0)
    train(a, 1)


def test_a_closed_round_says_what_had_been_committed(world: World) -> None:
    a = Trainee(world, 0, 10.0)
    train(a, 1)
    assert a.manager._session._close(1) is True
    verdict = Verdict.from_bytes(world.store.get(manager_keys.commit(1, 1)))
    assert verdict.closed
    assert not verdict.included


# -- the majority guard --------------------------------------------------------------------------


def partitioned(world: World, **keywords: Any) -> Manager:
    """One of three healthy replicas, which asks alone."""
    options = {"min_replica_size": 1, "join_timeout": timedelta(seconds=5), **keywords}
    for other in (1, 2):
        world.make(other, **options)
    return world.make(0, **options)


def test_one_of_three_healthy_replicas_is_no_quorum(world: World) -> None:
    alone = partitioned(world)
    with pytest.raises(TimeoutError, match=r"healthy but not asking: 1, 2; more than half"):
        alone.start_quorum(timeout=timedelta(seconds=40))
    assert world.store.list(manager_keys.QUORUMS) == []


def test_without_the_guard_it_is(world: World) -> None:
    assert step(partitioned(world, majority_guard=False), torch.ones(1))


def test_a_replica_goes_on_alone_once_the_others_leases_have_run_out(world: World) -> None:
    alone = partitioned(world, heartbeat_timeout=timedelta(seconds=40))
    for other in world.managers[:2]:
        other._session._lease._ended.set()  # as if killed: no last beat
    assert step(alone, torch.ones(1))
    assert alone.num_participants() == 1


def test_no_quorum_from_an_older_state_while_a_holder_of_the_newest_lives(world: World) -> None:
    options = {"join_timeout": timedelta(seconds=5)}
    a = Trainee(world, 0, 10.0, **options)
    train(a, 3)
    late = [Trainee(world, replica, 50.0, **options) for replica in (1, 2)]

    def asks(trainee: Trainee) -> bool:
        try:
            return trainee.step(1.0, timeout=timedelta(seconds=60))
        except TimeoutError:
            return False

    assert world.together(*(lambda t=t: asks(t) for t in late)) == [False, False]
    results = world.together(*(lambda t=t: asks(t) for t in (a, *late)))  # now a asks too
    assert results == [True, True, True]
    assert [t.state for t in (a, *late)] == [(4, 6.0)] * 3


# -- a member that is behind ---------------------------------------------------------------------


def skipped(world: World, rounds: int, *, first: int = 1) -> None:
    """Rounds of a member that is gone."""
    other = Identity(replica=90, incarnation="00001-00000001")
    for n in range(first, first + rounds):
        seat = Seat(member=90, incarnation=other.incarnation, replica_id="z", rank=0, step=n - 1,
                    heals=False)  # fmt: skip
        quorum = Quorum(n=n, step=n - 1, mode="", seats=(seat,), writer=other, branch=0, head=n - 1)
        world.store.put(manager_keys.quorum(n), quorum.to_bytes())


def test_a_member_that_is_behind_finds_the_newest_round_by_halving(world: World) -> None:
    behind = Trainee(world, 0, 10.0)
    behind.manager._session._is_new = False
    skipped(world, 310)
    before = world.store.usage.requests
    assert behind.step(1.0)
    assert newest_quorum(world).n == 311  # type: ignore[union-attr]
    assert world.store.usage.requests - before < 60
    rounds = {manager_keys.round_of(i.key) for i in world.store.list(manager_keys.ROUNDS)}
    assert rounds <= {311}


def test_a_join_of_a_round_that_began_without_the_member_is_removed(world: World) -> None:
    behind = Trainee(world, 0, 10.0)
    behind.manager._session._is_new = False
    ask = behind.manager._session._ask

    def asks(asking: Any) -> Any:
        join = ask(asking)
        if behind.manager._session.n == 0:
            skipped(world, 5)  # meanwhile
        return join

    behind.manager._session._ask = asks  # type: ignore[method-assign]
    assert behind.step(1.0)
    joins = [i.key for i in world.store.list(manager_keys.ROUNDS) if "/joins/" in i.key]
    assert {manager_keys.round_of(key) for key in joins} <= {6}


# -- fencing -------------------------------------------------------------------------------------


def test_a_process_that_waits_for_a_quorum_is_fenced_out_at_once(world: World) -> None:
    old = world.make("a", min_replica_size=2)
    began = threading.Event()

    def waits() -> None:
        began.set()
        old.start_quorum()

    def replaces() -> None:
        began.wait(60)
        world.make("a", min_replica_size=2)

    with pytest.raises(FencedOut, match="newer process of replica 'a'"):
        world.together(waits, replaces)


def test_a_fenced_process_logs_once_and_its_heartbeat_ends(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    old = world.make("a")
    world.make("a")
    with caplog.at_level(logging.ERROR):
        old._session._lease._thread.join(60)
        old._session._lease.look_around()
        for _ in range(3):
            with pytest.raises(FencedOut):
                old.start_quorum()
    assert not old._session._lease._thread.is_alive()
    assert sum("fenced out" in record.message for record in caplog.records) == 1


# -- resume --------------------------------------------------------------------------------------


def used(world: World) -> None:
    first = Trainee(world, 0, 100.0, save_every=1)
    train(first, 3)
    first.manager.shutdown()


def test_resuming_is_a_warning_with_step_and_age(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    used(world)
    with caplog.at_level(logging.WARNING):
        train(Trainee(world, 0, 0.0), 1)
    assert "resumed at step 2 from the state that was saved 0:0" in caplog.text


@pytest.mark.parametrize("keywords", [{"resume": False}, {"save_every": 0}])
def test_a_used_rendezvous_is_not_continued_without_being_asked(
    world: World, keywords: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    used(world)
    second = Trainee(world, 0, 50.0, **keywords)
    with caplog.at_level(logging.WARNING):
        train(second, 1)
    assert second.state == (1, 49.0)
    assert "has been used before: its last round was 3" in caplog.text
    assert line_before(newest_quorum(world), committed=False).branch == 4


def test_without_resume_a_process_still_heals_from_a_live_group(world: World) -> None:
    a = Trainee(world, 0, 10.0)
    train(a, 2)
    b = Trainee(world, 1, 50.0, resume=False)
    left = threading.Event()

    def joins() -> None:
        assert b.step(1.0)
        b.manager.shutdown()
        left.set()

    def goes_on() -> None:
        while not left.is_set():
            a.step(1.0)

    world.together(goes_on, joins)
    steps, weight = b.state
    assert (steps > 2, weight) == (True, 10.0 - steps)


def test_resume_that_is_required_fails_without_a_saved_state(world: World) -> None:
    with pytest.raises(ReplicaError, match="resume=True: expected a saved state"):
        Trainee(world, 0, 0.0, resume=True).step(1.0)


@pytest.mark.parametrize("keywords", [{"resume": "never"}, {"save_every": -1}])
def test_keywords_that_mean_nothing_are_refused(world: World, keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        world.make(0, **keywords)


# -- what is kept --------------------------------------------------------------------------------


def test_records_of_old_rounds_are_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum_client, "KEPT_ROUNDS", 4)
    monkeypatch.setattr(quorum_client, "SWEEP_ROUNDS_EVERY", 2)
    a = Trainee(world, 0, 100.0, save_every=0)
    zombie = world.make(7, min_replica_size=1, majority_guard=False)
    zombie._session._is_new = False
    zombie._session._lease.end("left")
    train(a, 20)
    a.manager.shutdown()
    for prefix in (manager_keys.QUORUMS, manager_keys.COMMITS):
        assert len(world.store.list(prefix)) <= 6
    late = Trainee(world, 1, 0.0, save_every=0)
    assert late.manager._session.n == 20
    # A process that was away for all these rounds cannot decide one of them again.
    zombie._session._lease.update(state="training")
    zombie._session._lease.beat()
    zombie.start_quorum()
    assert zombie._session.n == 21
    assert len(world.store.list(manager_keys.QUORUMS)) <= 7


def test_a_folder_keeps_no_empty_directories(world: World, tmp_path: Path) -> None:
    a = Trainee(world, 0, 100.0, save_every=1)
    train(a, 6)
    a.manager.shutdown()
    empty = [path for path in tmp_path.rglob("*") if path.is_dir() and not any(path.iterdir())]
    assert empty == []
    assert len([*(tmp_path / "manager" / "rounds").iterdir()]) == 1


def test_a_sweep_that_failed_is_made_good_by_the_next(world: World) -> None:
    a = Trainee(world, 0, 100.0, save_every=0)
    train(a, 1)
    sweep = a.manager._session.sweep
    a.manager._session.sweep = lambda n: None  # type: ignore[method-assign]
    train(a, 3)
    a.manager._session.sweep = sweep  # type: ignore[method-assign]
    train(a, 1)
    a.manager.shutdown()
    rounds = {manager_keys.round_of(i.key) for i in world.store.list(manager_keys.ROUNDS)}
    assert rounds == {5}


def test_calls_that_come_slowly_are_still_one_object(world: World) -> None:
    manager = world.make(0, coalesce=timedelta(milliseconds=1))
    manager.start_quorum()
    works = [manager.allreduce(torch.ones(3)) for _ in range(5)]
    assert all(work.wait() for work in works)
    assert manager.should_commit()
    manager._coalesce_s = 60.0 / 40  # a busy machine: each pause is longer than ``coalesce``
    manager.start_quorum()
    exchange = manager._calls._exchange  # type: ignore[union-attr]
    exchange._round = exchange._round.__class__(**{**vars(exchange._round), "coalesce_s": 1e-4})
    works = []
    for _ in range(5):
        works.append(manager.allreduce(torch.ones(3)))
        threading.Event().wait(0.002)  # far longer than ``coalesce``, shorter than its patience
    found = world.store.list(f"{manager_keys.round_dir(2)}payloads/")
    assert len(found) <= 1
    assert all(work.wait() for work in works)
