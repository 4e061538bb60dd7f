"""Processes of one replica that follow each other within a round."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol.records import Identity
from diloco.store.base import LocalStore
from diloco.training.replica_state import (
    EarlyContribution,
    ReplicaState,
    StateWriter,
    load_replica_state,
)
from tests.diloco.counting import COUNTING
from tests.diloco.training.leaving import (
    FRAGMENTS,
    LONG_S,
    OVERLAP,
    SETTINGS,
    MakeGroup,
    StepRecorder,
    steps_in_plans,
    wait_at,
)


@pytest.mark.parametrize("at", [6, 7], ids=["one-step", "whole-round"])
def test_steps_after_an_early_contribution_are_repeated_if_their_process_leaves_too(
    tiny_group: MakeGroup, at: int
) -> None:
    """The first process contributes steps 4 and 5 to round 2. The second makes step ``at`` and
    leaves before the round is decided."""
    group = tiny_group(**SETTINGS)
    recorder = StepRecorder(group, at=5, whole=False)
    has_left = threading.Event()

    other = group.start(0, **COUNTING, on_step=wait_at({5: has_left}))
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)

    def leaves(member: Any, joined: Any) -> None:
        recorder.made[1].append(joined.data_step)
        if joined.data_step == at:
            joined.leave(within_s=LONG_S)
            joined._shutdown.share = 0.0

    second = group.start(1, **COUNTING, on_step=leaves)
    group.wait(second)
    assert (second.error, second.reason) == (None, "left")

    def third_steps(member: Any, joined: Any) -> None:
        joined._lease.beat()
        has_left.set()

    third = group.start(1, **COUNTING, on_step=third_steps)
    group.wait()
    group.assert_agreed(other, third)
    assert steps_in_plans(group, 1, 0) == group.settings.total_steps


@pytest.mark.parametrize(("changes", "at"), [({}, 6), (OVERLAP, 8)], ids=["one", "overlap"])
def test_repeated_steps_do_not_count_in_the_tokens_of_a_replica(
    tiny_group: MakeGroup, changes: dict[str, Any], at: int
) -> None:
    """The second process has steps of round 2, with overlap also of round 3, and no time."""
    group = tiny_group(**{**SETTINGS, **changes})
    recorder = StepRecorder(group, at=5, whole=False)
    has_left = threading.Event()
    group.start(0, **COUNTING, on_step=wait_at({5: has_left}))
    group.wait(group.start(1, **COUNTING, on_step=recorder.first_process))

    def leaves(member: Any, joined: Any) -> None:
        if joined.data_step == at:
            joined.leave()

    group.wait(group.start(1, **COUNTING, on_step=leaves))
    saved = load_replica_state(group.store, 1)
    assert saved is not None
    assert (saved.data_step, saved.tokens) == (6, 6 * 8)
    has_left.set()
    group.start(1, **COUNTING)
    group.wait()


def test_a_periodic_state_keeps_the_early_contributions(tiny_group: MakeGroup) -> None:
    """The first process contributes early to rounds 3 and 4; the second saves its state after round
    3 and is killed in round 4, which is still open."""
    group = tiny_group(**{**SETTINGS, **FRAGMENTS}, state_every=1)
    recorder = StepRecorder(group, at=4, whole=False)
    second_is_there, third_is_there = threading.Event(), threading.Event()

    other = group.start(0, **COUNTING, on_step=wait_at({4: second_is_there, 7: third_is_there}))
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)

    def dies(member: Any, joined: Any) -> None:
        recorder.made[1].append(joined.data_step)
        second_is_there.set()
        if joined.data_step == 6:
            joined._loop.tasks.finish_state()
            member.store.dead = True

    second = group.start(1, **COUNTING, on_step=dies)
    group.wait(second)
    assert second.error is not None

    known: list[int] = []

    def third_steps(member: Any, joined: Any) -> None:
        if not third_is_there.is_set():
            known.extend(joined._loop.progress.early)
        joined._lease.beat()
        third_is_there.set()

    third = group.start(1, **COUNTING, on_step=third_steps)
    group.wait()
    group.assert_agreed(other, third)
    assert known == [4], "so it does not contribute to round 4 itself"
    early = next(c for c in group.plan(4).contributions if c.replica == 1)
    assert early.incarnation.startswith("00001")


def test_a_late_write_does_not_replace_the_state_of_a_leaving_process(tmp_path: Path) -> None:
    """The request of a periodic save can hang until the process has saved its state and exited."""
    store = LocalStore(tmp_path)
    me = Identity(replica=1, incarnation="00001-00000000")
    early = {2: EarlyContribution(incarnation=me.incarnation)}
    periodic = ReplicaState(round=1, tokens=8, trees={}, residuals={})
    leaving = replace(periodic, early=early, data_step=6)
    StateWriter(leaving).write(store, me, wall_s=0.0, name="left", replaces=True)
    StateWriter(periodic).write(store, me, wall_s=0.0)
    saved = load_replica_state(store, 1)
    assert saved is not None
    assert (list(saved.early), saved.data_step) == ([2], 6)
    again = replace(leaving, data_step=7)
    StateWriter(again).write(store, me, wall_s=0.0, name="left", replaces=True)
    saved = load_replica_state(store, 1)
    assert saved is not None
    assert saved.data_step == 7
