"""Graceful shutdown: every step counts once, the group does not wait, and the next process
continues at the same position."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.records import ReplicaStateManifest
from tests.diloco.counting import COUNTING
from tests.diloco.training.leaving import (
    FRAGMENTS,
    LONG_S,
    OVERLAP,
    SETTINGS,
    SEVERAL_OPEN,
    MakeGroup,
    StepRecorder,
    assert_all_counted,
    drain,
    leave_and_return,
    newest_beats,
    planned_weight,
    steps_in_plans,
    wait_at,
)
from tests.matrix import matrix


@matrix("plan", ["gather", "sharded"], fast=("sharded",))
@pytest.mark.parametrize(
    ("changes", "at"),
    [({}, 5), (FRAGMENTS, 4), ({"late_keep": 0.0}, 5)],
    ids=["one", "fragments", "overwrite"],
)
def test_a_drained_replica_contributes_early_and_its_next_process_continues(
    tiny_group: MakeGroup, changes: dict[str, Any], at: int, plan: str
) -> None:
    """The drain is in the middle of a round that the others close much later."""
    group = tiny_group(**{**SETTINGS, **changes}, reduce_plan=plan)
    recorder = StepRecorder(group, at=at, whole=False, meet=at + 2)
    other = group.start(0, **COUNTING, on_step=recorder.other_replica)
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)
    assert (first.error, first.reason) == (None, "left")
    (beat,) = newest_beats(group, 1)
    assert (beat.state, beat.message) == ("left", "moved")
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    group.wait()
    group.assert_log()
    group.assert_agreed(other, second)
    assert second.reason == "completed"
    assert_all_counted(group, recorder, other)
    reports = [beat.state for beat in newest_beats(group, 1)]
    assert reports == ["left", "done"]


@matrix(
    "changes",
    [{}, FRAGMENTS, OVERLAP, SEVERAL_OPEN],
    fast=[{}, SEVERAL_OPEN],
    ids=["one", "fragments", "overlap", "several-open"],
)
def test_a_drain_with_time_completes_the_round(
    tiny_group: MakeGroup, changes: dict[str, Any]
) -> None:
    group = tiny_group(**{**SETTINGS, **changes})
    recorder = StepRecorder(group, at=4, whole=True)
    other = group.start(0, **COUNTING, on_step=recorder.other_replica)
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)
    assert (first.error, first.reason) == (None, "left")
    assert first.steps % group.settings.round_steps == 0
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    group.wait()
    group.assert_log()
    group.assert_agreed(other, second)
    last = group.commits()[-1]
    for fragment in range(group.settings.num_fragments):
        counted = steps_in_plans(group, 1, fragment)
        weights = [n for n in range(4) if n % group.settings.num_fragments == fragment]
        assert len({other.weights()[n].item() for n in weights}) == 1
        if fragment == last.fragment and not changes.get("overlap_steps"):
            assert counted == len({*recorder.made[0], *recorder.made[1]})
    assert set(recorder.made[0]).isdisjoint(recorder.made[1])


def test_steps_after_an_open_round_are_contributed_after_its_commit(
    tiny_group: MakeGroup,
) -> None:
    """Two steps of round 3 are made while round 2 is exchanged: its commit is their base."""
    group = tiny_group(**{**SETTINGS, **OVERLAP})
    recorder = StepRecorder(group, at=9, whole=False)
    other, _ = leave_and_return(group, recorder, recorder.first_process)
    assert sorted(recorder.made[0] + recorder.made[1]) == list(range(26)), "with tau at the end"
    handed_in = next(c for c in group.plan(3).contributions if c.replica == 1)
    assert (handed_in.incarnation[:5], handed_in.steps) == ("00001", 2)
    assert other.weights().tolist() == [planned_weight(group, 0)] * 4


def test_no_replica_waits_for_the_next_process_to_reduce_its_predecessors_block(
    tiny_group: MakeGroup,
) -> None:
    """The plan names replica 1, whose new process is alive and makes its steps."""
    group = tiny_group(**SETTINGS, reduce_plan="sharded")
    recorder = StepRecorder(group, at=5, whole=False)
    committed: list[bool] = []

    def busy(member: Any, joined: Any) -> None:
        recorder.second_process(member, joined)
        give_up = time.monotonic() + 30
        while not committed and time.monotonic() < give_up:
            time.sleep(0.005)
            committed.extend([True] * (len(group.commits()) >= 2))

    other = group.start(0, **COUNTING, on_step=recorder.other_replica)
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)
    second = group.start(1, **COUNTING, on_step=busy)
    group.wait()
    group.assert_agreed(other, second)
    assert committed, "round 2 was committed while the successor made its first step"


def test_the_next_process_waits_for_a_complete_early_contribution(tiny_group: MakeGroup) -> None:
    """It makes no step of the round, because the early contribution contains all of them."""
    group = tiny_group(**SETTINGS)
    recorder = StepRecorder(group, at=7, whole=False)
    waiting = threading.Event()

    other = group.start(0, **COUNTING, on_step=wait_at({7: waiting}))
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    while newest_beats(group, 1)[-1].state != "waiting":
        time.sleep(0.001)
    assert not recorder.made[1]
    waiting.set()
    group.wait()
    group.assert_agreed(other, second)
    assert_all_counted(group, recorder, other)
    assert recorder.made[1][0] == 8


def test_a_single_replica_closes_its_last_round(tiny_group: MakeGroup) -> None:
    group = tiny_group(**{**SETTINGS, "num_replicas": 1})
    recorder = StepRecorder(group, at=5, whole=False)
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)
    assert [c.steps for r in (1, 2) for c in group.plan(r).contributions] == [4, 2]
    assert len(group.commits()) == 2
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    group.wait(second)
    assert second.weights().tolist() == [-22.0] * 4
    assert recorder.made[1][0] == 8, "the round is over, its schedule goes on with the next"


def test_all_replicas_are_drained_in_a_round_and_return(tiny_group: MakeGroup) -> None:
    """The next processes close the round with the early contributions."""
    group = tiny_group(**SETTINGS)
    there = threading.Barrier(2)

    def both(member: Any, joined: Any) -> None:
        if joined.data_step == 5:
            there.wait(600)
            joined.leave(within_s=LONG_S, reason="paused")
            joined._shutdown.share = 0.0
            there.wait(600)

    paused = [group.start(replica, **COUNTING, on_step=both) for replica in range(2)]
    group.wait(*paused)
    assert [member.reason for member in paused] == ["left", "left"]

    def meet(member: Any, joined: Any) -> None:
        if member.steps == 1:
            joined._lease.beat()  # at once, so that the rounds wait for it
            there.wait(600)

    resumed = [group.start(replica, **COUNTING, on_step=meet) for replica in range(2)]
    group.wait(*resumed)
    group.assert_log()
    group.assert_agreed(*resumed)
    made = sum(member.steps for member in (*paused, *resumed))
    counted = sum(steps_in_plans(group, replica, 0) for replica in range(2))
    assert counted == made
    assert resumed[0].weights().tolist() == [planned_weight(group, 0)] * 4


def test_residuals_are_restored_by_the_next_process(tiny_group: MakeGroup) -> None:
    """One of four values is sent per round, so that the residuals contain most of the work."""
    group = tiny_group(**SETTINGS, codec="topk", topk=1, error_feedback=1.0)
    recorder = StepRecorder(group, at=5, whole=False)
    other = group.start(0, **COUNTING, on_step=recorder.other_replica)
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    group.wait()
    group.assert_agreed(other, second)
    assert [len(c.contributors) for c in group.commits()] == [2] * 6
    left = [member.group._loop.progress.residuals.of[0].sum() for member in (other, second)]
    everything = 4.0 * group.settings.total_steps
    assert -other.weights().sum() + sum(left) / 2 == pytest.approx(everything, abs=1e-3)


def test_without_time_a_replica_only_saves_its_state(tiny_group: MakeGroup) -> None:
    group = tiny_group(**SETTINGS)

    def leave(member: Any, joined: Any) -> None:
        if joined.data_step == 5:
            joined.leave()

    other = group.start(0, **COUNTING)
    first = group.start(1, **COUNTING, on_step=leave)
    group.wait()
    assert first.reason == "left" and other.error is None
    assert [c.replica for c in group.plan(2).contributions] == [0]
    listed = [i.key for i in group.store.list(keys.replica_state(1)) if "manifest" in i.key]
    manifest = ReplicaStateManifest.from_bytes(group.store.get(max(listed)))
    assert (manifest.round, manifest.handed_in, manifest.tokens) == (1, (), 4 * 8)


def test_a_replica_at_the_start_barrier_leaves_at_once(tiny_group: MakeGroup) -> None:
    group = tiny_group(**SETTINGS, start_replicas=2)
    member = group.start(0, **COUNTING)
    while not any(beat.message for beat in newest_beats(group, 0)):
        time.sleep(0.001)
    drain(group, 1, 0, within_s=1e9)
    group.wait(member)
    (beat,) = newest_beats(group, 0)
    assert (beat.state, beat.message) == ("left", "drained by command 1")
    assert (member.reason, member.steps) == ("left", 0)
    assert not group.store.list(keys.replica_state(0)), "there is nothing to save"


def test_the_last_round_completes_the_run_during_a_drain(tiny_group: MakeGroup) -> None:
    group = tiny_group(**{**SETTINGS, "num_replicas": 1, "total_rounds": 2})
    recorder = StepRecorder(group, at=6, whole=True)
    member = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(member)
    assert (member.error, member.reason) == (None, "completed")
    assert group.store.list("final/"), "and there was time to publish its result"
