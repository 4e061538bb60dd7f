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
from diloco.protocol.manager_records import CommitDecision, Quorum, QuorumMember, Segment
from diloco.protocol.records import Identity
from diloco.torchft import round_records, state_store
from tests.diloco.manager_harness import Harness, step
from tests.diloco.torchft.test_manager_recovery import Trainee, newest_quorum, saved_steps

ME = Identity(replica=1, incarnation="00001-00000001")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.close()


def train(trainee: Trainee, steps: int) -> None:
    for _ in range(steps):
        assert trainee.step(1.0)


def rolled_back(harness: Harness, to_step: int, weight: float, **keywords: Any) -> Trainee:
    trainee = Trainee(harness, 0, weight, **keywords)
    trainee.manager.load_state_dict({"step": to_step, "batches_committed": to_step})
    return trainee


# -- rollbacks and saved states ------------------------------------------------------------------


def test_after_a_rollback_the_group_resumes_the_new_branch(harness: Harness) -> None:
    first = Trainee(harness, 0, 100.0, save_every=1)
    train(first, 8)
    first.manager.shutdown()
    second = rolled_back(harness, 2, 50.0, save_every=1)
    train(second, 3)
    second.manager.shutdown()
    third = Trainee(harness, 0, 0.0, save_every=1)
    train(third, 1)
    # Saved at the start of a step, so the newest save has the state after step 4.
    assert third.state == (5, 50.0 - 3.0)


def test_a_rollback_saves_its_state_at_once(harness: Harness) -> None:
    first = Trainee(harness, 0, 100.0, save_every=2)
    train(first, 7)
    first.manager.shutdown()
    second = rolled_back(harness, 3, 50.0, save_every=100)
    train(second, 1)
    second.manager.shutdown()
    third = Trainee(harness, 0, 0.0, save_every=100)
    train(third, 1)
    assert third.state == (4, 49.0)


def test_saved_states_of_an_abandoned_branch_are_swept_later(harness: Harness) -> None:
    first = Trainee(harness, 0, 100.0, save_every=1)
    train(first, 8)
    first.manager.shutdown()
    second = rolled_back(harness, 2, 50.0, save_every=1)
    train(second, 1)
    assert saved_steps(harness) == [2]
    assert (
        len(harness.store.list(manager_keys.STATES)) > 2
    )  # with one new state, the old ones are kept
    train(second, 2)
    assert saved_steps(harness) == [3, 4]
    parsed = [manager_keys.parse_saved(i.key) for i in harness.store.list(manager_keys.STATES)]
    assert {result[0].step for result in parsed if result} == {3, 4}


def save(harness: Harness, saved: Saved, *ranks: int) -> None:
    for rank in ranks:
        state_store.save(
            harness.store, rank, {"at": saved.step}, saved=saved, writer=ME, wall_s=1.0
        )


def test_states_of_different_branches_are_not_complete(harness: Harness) -> None:
    save(harness, Saved(0, 8, 8), 0)
    save(harness, Saved(5, 8, 8), 1)
    for line in (Line(0, 9), Line(5, 9, (Segment(branch=0, until=4),)), Line(5, 9)):
        assert state_store.complete_states(harness.store, line, ranks=[0, 1]) == []


def test_a_process_that_is_behind_deletes_nothing_of_the_new_branch(harness: Harness) -> None:
    save(harness, Saved(0, 2, 2), 0)
    save(harness, Saved(0, 4, 4), 0)
    save(harness, Saved(0, 6, 6), 0)
    save(harness, Saved(7, 8, 5), 0)
    state_store.sweep(harness.store, Line(0, 6), ranks=[0])
    left = {manager_keys.parse_saved(i.key) for i in harness.store.list(manager_keys.STATES)}
    assert {result[0] for result in left if result} == {
        Saved(0, 4, 4),
        Saved(0, 6, 6),
        Saved(7, 8, 5),
    }


def test_a_state_saved_by_an_earlier_release_is_resumed(harness: Harness) -> None:
    trainee = Trainee(harness, 0, 9.0, save_every=1)
    state = {"user": {"default": trainee.save()}, "torchft": {"step": 6, "batches_committed": 6}}
    state_store.save(harness.store, 0, state, saved=Saved(0, 0, 6), writer=ME, wall_s=0.0)
    keys = [info.key for info in harness.store.list(manager_keys.STATES)]
    assert keys[-1] == "manager/states/00000006/00000.json"
    old = Quorum(n=7, step=6, mode="", seats=(), writer=ME)
    for n in range(1, 8):
        harness.store.put(manager_keys.quorum(n), old.to_bytes())
    trainee.manager._session.n = 7
    trainee.manager._session.quorum = old
    trainee.manager._session._is_new = False
    train(trainee, 1)
    assert trainee.state == (7, 8.0)


# -- the line ------------------------------------------------------------------------------------


def test_a_line_contains_its_segments() -> None:
    line = Line(20, 25, (Segment(branch=0, until=7), Segment(branch=9, until=12)))
    assert line.contains(0, 7)
    assert line.contains(9, 12)
    assert line.contains(20, 25)
    assert not line.contains(0, 8)
    assert not line.contains(9, 13)
    assert not line.contains(13, 14)
    assert not line.contains(20, 26)
    assert not line.contains(UNKNOWN, 0)


def test_a_branch_continues_the_line_up_to_its_start() -> None:
    line = Line(20, 25, (Segment(branch=0, until=7), Segment(branch=9, until=12)))
    forked = line.forked_from(StateId(9, 11, 8), 30)
    assert forked == Line(30, 0, (Segment(branch=0, until=7), Segment(branch=9, until=11)))
    assert line.forked_from(StateId(UNKNOWN, 0, 8), 30) == Line(30)


def test_a_later_state_of_an_abandoned_branch_is_not_the_newest() -> None:
    line = Line(5, 8, (Segment(branch=0, until=3),))
    result = starting_state({"a": StateId(0, 4, 90), "b": StateId(5, 8, 6)}, line)
    assert result == StateId(5, 8, 6)
    with pytest.raises(AbandonedBranch, match="Restart these processes"):
        starting_state({"a": StateId(0, 4, 90)}, line)


def test_a_member_of_an_abandoned_branch_heals_at_an_equal_step(harness: Harness) -> None:
    a, b = Trainee(harness, 0, 10.0), Trainee(harness, 1, 20.0)
    harness.together(lambda: a.step(1.0), lambda: b.step(1.0))
    b.manager._recovery.branch, b.manager._recovery.head = 7, 9  # another state of step 1
    b.weight += 5.0
    harness.together(lambda: a.step(1.0), lambda: b.step(1.0))
    assert a.state == b.state == (2, 8.0)
    assert b.loads == 2


def test_a_healed_state_is_loaded_without_should_commit(harness: Harness) -> None:
    options = {"use_async_quorum": True, "min_replica_size": 2}
    a, b = Trainee(harness, 0, 10.0, **options), Trainee(harness, 1, 20.0, **options)
    patience_s, a.manager._timeout_s = a.manager._timeout_s, 20.0

    def gives_up() -> bool:
        b.manager.start_quorum()
        b.manager.wait_quorum()
        return b.step(1.0)

    def tries() -> bool:
        first = a.step(1.0)  # b has no contribution in it
        a.manager._timeout_s = patience_s
        return first or a.step(1.0)

    assert harness.together(tries, gives_up) == [True, True]
    assert b.state == a.state


# -- closed rounds -------------------------------------------------------------------------------


def test_a_closed_round_commits_nothing(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0)
    a.manager.start_quorum()
    assert a.manager._session.records.close(1) is False
    assert not a.manager.should_commit()
    assert not a.manager.should_commit()  # nor in another call
    assert a.state == (0, 10.0)
    train(a, 1)


def test_closing_a_round_returns_its_commit(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0)
    train(a, 1)
    assert a.manager._session.records.close(1) is True
    decision = CommitDecision.from_bytes(harness.store.get(manager_keys.commit(1, 1)))
    assert decision.closed
    assert not decision.included


# -- the majority guard --------------------------------------------------------------------------


def partitioned(harness: Harness, **keywords: Any) -> Manager:
    """One of three healthy replicas joins alone."""
    options = {"min_replica_size": 1, "join_timeout": timedelta(seconds=5), **keywords}
    for other in (1, 2):
        harness.make(other, **options)
    return harness.make(0, **options)


def test_one_of_three_healthy_replicas_is_no_quorum(harness: Harness) -> None:
    alone = partitioned(harness)
    with pytest.raises(TimeoutError, match=r"healthy but not joining: 1, 2; more than half"):
        alone.start_quorum(timeout=timedelta(seconds=40))
    assert harness.store.list(manager_keys.QUORUMS) == []


def test_one_of_three_is_a_quorum_without_the_guard(harness: Harness) -> None:
    assert step(partitioned(harness, majority_guard=False), torch.ones(1))


def test_a_replica_continues_alone_after_the_other_leases_expire(harness: Harness) -> None:
    alone = partitioned(harness, heartbeat_timeout=timedelta(seconds=40))
    for other in harness.managers[:2]:
        other._session.peers.lease._ended.set()  # as if killed: no last heartbeat
    assert step(alone, torch.ones(1))
    assert alone.num_participants() == 1


def test_no_quorum_from_an_older_state_while_a_holder_of_the_newest_lives(harness: Harness) -> None:
    options = {"join_timeout": timedelta(seconds=5)}
    a = Trainee(harness, 0, 10.0, **options)
    train(a, 3)
    late = [Trainee(harness, replica, 50.0, **options) for replica in (1, 2)]

    def asks(trainee: Trainee) -> bool:
        with pytest.raises(TimeoutError):
            trainee.step(1.0, timeout=timedelta(seconds=60))
        return True

    assert harness.together(*(lambda t=t: asks(t) for t in late)) == [True, True]
    results = harness.together(*(lambda t=t: t.step(1.0) for t in (a, *late)))  # now a joins too
    assert results == [True, True, True]
    assert [t.state for t in (a, *late)] == [(4, 6.0)] * 3


# -- a member that is behind ---------------------------------------------------------------------


def skipped(harness: Harness, rounds: int, *, first: int = 1) -> None:
    """Rounds of a member that is gone."""
    other = Identity(replica=90, incarnation="00001-00000001")
    for n in range(first, first + rounds):
        seat = QuorumMember(
            member=90,
            incarnation=other.incarnation,
            replica_id="z",
            rank=0,
            step=n - 1,
            heals=False,
        )
        quorum = Quorum(n=n, step=n - 1, mode="", seats=(seat,), writer=other, branch=0, head=n - 1)
        harness.store.put(manager_keys.quorum(n), quorum.to_bytes())


def test_a_member_that_is_behind_finds_the_newest_round(harness: Harness) -> None:
    behind = Trainee(harness, 0, 10.0, heartbeat_interval=timedelta(seconds=100))
    behind.manager._session._is_new = False
    skipped(harness, 310)
    before = harness.store.usage.requests
    assert behind.step(1.0)
    assert newest_quorum(harness).n == 311  # type: ignore[union-attr]
    assert harness.store.usage.requests - before < 155, "not one for each round"
    rounds = {manager_keys.round_of(i.key) for i in harness.store.list(manager_keys.ROUNDS)}
    assert rounds <= {311}


def test_a_join_of_a_round_that_began_without_the_member_is_removed(harness: Harness) -> None:
    behind = Trainee(harness, 0, 10.0)
    behind.manager._session._is_new = False
    ask = behind.manager._session._ask

    def asks(asking: Any) -> Any:
        join = ask(asking)
        if behind.manager._session.n == 0:
            skipped(harness, 5)  # meanwhile
        return join

    behind.manager._session._ask = asks  # type: ignore[method-assign]
    assert behind.step(1.0)
    joins = [i.key for i in harness.store.list(manager_keys.ROUNDS) if "/joins/" in i.key]
    assert {manager_keys.round_of(key) for key in joins} <= {6}


# -- fencing -------------------------------------------------------------------------------------


def test_a_process_that_waits_for_a_quorum_is_fenced_out_at_once(harness: Harness) -> None:
    old = harness.make("a", min_replica_size=2)
    began = threading.Event()

    def waits() -> None:
        began.set()
        old.start_quorum()

    def replaces() -> None:
        began.wait(600)
        harness.make("a", min_replica_size=2)

    with pytest.raises(FencedOut, match="newer process of replica 'a'"):
        harness.together(waits, replaces)


def test_a_fenced_process_logs_once_and_its_heartbeat_ends(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    old = harness.make("a")
    harness.make("a")
    with caplog.at_level(logging.ERROR):
        old._session.peers.lease._thread.join(600)
        old._session.peers.lease.look_around()
        for _ in range(3):
            with pytest.raises(FencedOut):
                old.start_quorum()
    assert not old._session.peers.lease._thread.is_alive()
    assert sum("fenced out" in record.message for record in caplog.records) == 1


# -- resume --------------------------------------------------------------------------------------


def used(harness: Harness) -> None:
    first = Trainee(harness, 0, 100.0, save_every=1)
    train(first, 3)
    first.manager.shutdown()


def test_resuming_is_a_warning_with_step_and_age(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    used(harness)
    with caplog.at_level(logging.WARNING):
        train(Trainee(harness, 0, 0.0), 1)
    assert "resumed at step 2 from the state saved 0:0" in caplog.text


@pytest.mark.parametrize("keywords", [{"resume": False}, {"save_every": 0}])
def test_a_used_rendezvous_is_not_resumed_with_resume_false(
    harness: Harness, keywords: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    used(harness)
    second = Trainee(harness, 0, 50.0, **keywords)
    with caplog.at_level(logging.WARNING):
        train(second, 1)
    assert second.state == (1, 49.0)
    assert "has been used before: its last round was 3" in caplog.text
    assert line_before(newest_quorum(harness), committed=False).branch == 4


def test_without_resume_a_process_still_heals_from_a_live_group(harness: Harness) -> None:
    a = Trainee(harness, 0, 10.0)
    train(a, 2)
    b = Trainee(harness, 1, 50.0, resume=False)
    left = threading.Event()

    def joins() -> None:
        assert b.step(1.0)
        b.manager.shutdown()
        left.set()

    def continue_training() -> None:
        while not left.is_set():
            a.step(1.0)

    harness.together(continue_training, joins)
    steps, weight = b.state
    assert (steps > 2, weight) == (True, 10.0 - steps)


def test_a_required_resume_fails_without_a_saved_state(harness: Harness) -> None:
    with pytest.raises(ReplicaError, match="resume=True: expected a saved state"):
        Trainee(harness, 0, 0.0, resume=True).step(1.0)


@pytest.mark.parametrize("keywords", [{"resume": "never"}, {"save_every": -1}])
def test_invalid_keywords_are_refused(harness: Harness, keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        harness.make(0, **keywords)


# -- retention -----------------------------------------------------------------------------------


def test_records_of_old_rounds_are_deleted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_records, "KEPT_ROUNDS", 4)
    monkeypatch.setattr(round_records, "SWEEP_ROUNDS_EVERY", 2)
    a = Trainee(harness, 0, 100.0, save_every=0)
    wait = timedelta(seconds=5)
    zombie = harness.make(7, min_replica_size=1, majority_guard=False, join_timeout=wait)
    zombie._session._is_new = False
    zombie._session.peers.lease.end("left")
    train(a, 20)
    a.manager.shutdown()
    for prefix in (manager_keys.QUORUMS, manager_keys.COMMITS):
        assert len(harness.store.list(prefix)) <= 6
    late = Trainee(harness, 1, 0.0, save_every=0)
    assert late.manager._session.n == 20
    # A process that was paused for all these rounds cannot decide one of them again.
    zombie._session.peers.lease.update(state="training")
    zombie._session.peers.lease.beat()
    zombie.start_quorum()
    assert zombie._session.n == 21
    assert len(harness.store.list(manager_keys.QUORUMS)) <= 7


def test_a_folder_has_no_empty_directories(harness: Harness, tmp_path: Path) -> None:
    a = Trainee(harness, 0, 100.0, save_every=1)
    train(a, 6)
    a.manager.shutdown()
    empty = [path for path in tmp_path.rglob("*") if path.is_dir() and not any(path.iterdir())]
    assert empty == []
    assert len([*(tmp_path / "manager" / "rounds").iterdir()]) == 1


def test_a_failed_sweep_is_completed_by_the_next(harness: Harness) -> None:
    a = Trainee(harness, 0, 100.0, save_every=0)
    train(a, 1)
    sweep = a.manager._session.records.sweep
    a.manager._session.records.sweep = lambda n: None  # type: ignore[method-assign]
    train(a, 3)
    a.manager._session.records.sweep = sweep  # type: ignore[method-assign]
    train(a, 1)
    a.manager.shutdown()
    rounds = {manager_keys.round_of(i.key) for i in harness.store.list(manager_keys.ROUNDS)}
    assert rounds == {5}


def test_slow_calls_are_one_object(harness: Harness) -> None:
    manager = harness.make(0, coalesce=timedelta(milliseconds=1))
    manager.start_quorum()
    works = [manager.allreduce(torch.ones(3)) for _ in range(5)]
    assert all(work.wait() for work in works)
    assert manager.should_commit()
    manager.start_quorum()
    exchange = manager._exchange
    exchange._round = exchange._round.__class__(**{**vars(exchange._round), "coalesce_s": 0.1})
    works = []
    for _ in range(5):
        works.append(manager.allreduce(torch.ones(3)))
        threading.Event().wait(0.15)  # longer than ``coalesce``, far shorter than its patience
    result = harness.store.list(f"{manager_keys.round_dir(2)}payloads/")
    assert len(result) <= 1
    assert all(work.wait() for work in works)
