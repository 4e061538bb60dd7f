"""Graceful shutdown: every step counts once, the group does not wait, and the next process
continues at the same position.

The model counts: each inner step lowers each weight by 1, the outer optimizer adds contributions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco.errors import StopReason, StopTraining
from diloco.membership.graceful_shutdown import BASE_SHARE, COMMIT_SHARE
from diloco.protocol import keys
from diloco.protocol.records import Command, Heartbeat, ReplicaStateManifest
from tests.matrix import matrix

MakeGroup = Callable[..., Any]

LONG_S = 3000.0
"""A minute of real time on the tests' clock: a test that waits this long fails."""


class Counter(nn.Module):
    """Four weights in four layers, all 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(4)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def one_down(model: nn.Module, replica: int, step: int) -> torch.Tensor:
    return torch.stack([parameter.sum() for parameter in model.parameters()]).sum()


COUNTING: dict[str, Any] = {"make_model": Counter, "loss": one_down, "lr": 1.0}
SETTINGS: dict[str, Any] = {
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "num_replicas": 2,
    "sync_every": 4,
    "total_rounds": 6,
    "checkpoint_every": 1,
    # On a busy machine a replica can miss a round; all of its steps are to count then.
    "late_keep": 1.0,
}
FRAGMENTS = {"num_fragments": 2, "total_rounds": 8}
OVERLAP = {"overlap_steps": 2, "mixing_alpha": 1.0}
SEVERAL_OPEN = {**FRAGMENTS, "overlap_steps": 3, "mixing_alpha": 1.0}


def drain(group: Any, n: int, replica: int | None, **arguments: object) -> None:
    command = Command(n=n, command="drain", replica=replica, arguments=arguments, wall_s=0.0)
    assert group.store.create(keys.control(n), command.to_bytes())


class StepRecorder:
    """Records the data steps of replica 1 by process, and synchronises them with replica 0."""

    def __init__(self, group: Any, *, at: int, whole: bool, meet: int | None = None) -> None:
        self.group, self.at, self.whole, self.meet = group, at, whole, meet
        self.made: list[list[int]] = [[], []]
        self.second_steps, self.second_meets = threading.Event(), threading.Event()

    def first_process(self, member: Any, joined: Any) -> None:
        """Drained after data step ``at``; completes its round only if ``whole``."""
        self.made[0].append(joined.data_step)
        if joined.data_step == self.at:
            drain(self.group, 1, 1, within_s=LONG_S, reason="moved")
            while not joined._shutdown.is_requested:
                time.sleep(0.001)
            if not self.whole:
                joined._shutdown.share = 0.0  # the time for further steps is over

    def second_process(self, member: Any, joined: Any) -> None:
        self.made[1].append(joined.data_step)
        if not self.second_steps.is_set():
            joined._lease.beat()  # at once, so that the next round waits for it
            self.second_steps.set()
        if joined.data_step == self.meet:
            self.second_meets.set()

    def other_replica(self, member: Any, joined: Any) -> None:
        """Replica 0 waits in the middle of a round for the second process of replica 1, and for the
        same process at data step ``meet``: no round waits for it to which the first one has
        contributed."""
        if joined.data_step == (9 if self.whole else self.at):
            assert self.second_steps.wait(600)
        if joined.data_step == self.meet:
            assert self.second_meets.wait(600)


def steps_in_plans(group: Any, replica: int, fragment: int) -> int:
    plans = [group.plan(commit.round) for commit in group.commits() if not commit.void]
    return sum(
        c.steps
        for plan in plans
        if plan.fragment == fragment
        for c in plan.contributions
        if c.replica == replica
    )


def planned_weight(group: Any, fragment: int) -> float:
    """The value that a weight of the fragment must have according to the plans."""
    plans = [group.plan(commit.round) for commit in group.commits() if not commit.void]
    return -sum(
        c.weight * c.steps
        for plan in plans
        if plan.fragment == fragment
        for c in plan.contributions
    )


def newest_beats(group: Any, replica: int) -> list[Heartbeat]:
    listed = [i.key for i in group.store.list(keys.member(replica)) if keys.parse_beat(i.key)]
    return [Heartbeat.from_bytes(group.store.get(key)) for key in sorted(listed)]


def assert_all_counted(group: Any, recorder: StepRecorder, survivor: Any) -> None:
    """Each step of both processes is in exactly one contribution to each fragment, except steps
    after the last round of the fragment; and the weights match the plans."""
    settings, commits = group.settings, group.commits()
    first, second = recorder.made
    assert sorted(first + second) == list(range(settings.total_steps)), "each data step once"
    weights = survivor.weights().tolist()
    for fragment in range(settings.num_fragments):
        last = max(c.round for c in commits if c.fragment == fragment)
        made = last * settings.round_steps
        assert steps_in_plans(group, 1, fragment) == made, f"fragment {fragment}"
        assert steps_in_plans(group, 0, fragment) == made
        layers = [n for n in range(4) if n % settings.num_fragments == fragment]
        assert [weights[n] for n in layers] == [planned_weight(group, fragment)] * len(layers)
    assert commits[-1].tokens_total == 2 * 8 * settings.total_steps


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
    other = group.start(0, **COUNTING, on_step=recorder.other_replica)
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)
    assert (first.error, first.reason) == (None, "left")
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    group.wait()
    group.assert_log()
    group.assert_agreed(other, second)
    assert sorted(recorder.made[0] + recorder.made[1]) == list(range(26)), "with tau at the end"
    handed_in = next(c for c in group.plan(3).contributions if c.replica == 1)
    assert (handed_in.incarnation[:5], handed_in.steps) == ("00001", 2)
    assert other.weights().tolist() == [planned_weight(group, 0)] * 4


def interrupt_once(joined: Any, *, before: bool) -> None:
    """Let the next exchange end in the drain's first stage as if the time for steps were over, and
    ``before`` or after the contribution is uploaded: the thread looked at the clock before the
    drain raised the share."""
    loop, shutdown = joined._loop, joined._shutdown
    exchange, settle = loop.inflight._exchange, loop._settle
    interrupted: list[int] = []

    def interrupt() -> None:
        interrupted.append(1)
        while shutdown.share < BASE_SHARE:
            time.sleep(0.001)
        time.sleep(0.02)  # so that the drain waits for this exchange, in most trials
        raise StopTraining(StopReason.LEFT)

    def exchange_once(opened: Any) -> Any:
        if before and not interrupted:
            interrupt()
        return exchange(opened)

    def settle_once(opened: Any) -> Any:
        if not before and not interrupted:
            interrupt()
        return settle(opened)

    loop.inflight._exchange, loop._settle = exchange_once, settle_once


@pytest.mark.parametrize("before", [True, False], ids=["before-upload", "after-upload"])
@pytest.mark.parametrize("at", [8, 9], ids=["next-round", "steps-of-next-round"])
def test_an_exchange_that_is_interrupted_while_the_drain_waits_is_resumed(
    tiny_group: MakeGroup, at: int, before: bool
) -> None:
    group = tiny_group(**{**SETTINGS, **OVERLAP})
    recorder = StepRecorder(group, at=at, whole=False)

    def leaves(member: Any, joined: Any) -> None:
        if joined.data_step == 7:
            interrupt_once(joined, before=before)
        recorder.first_process(member, joined)

    other = group.start(0, **COUNTING, on_step=recorder.other_replica)
    first = group.start(1, **COUNTING, on_step=leaves)
    group.wait(first)
    assert (first.error, first.reason) == (None, "left")
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    group.wait()
    group.assert_log()
    group.assert_agreed(other, second)
    assert sorted(recorder.made[0] + recorder.made[1]) == list(range(26)), "with tau at the end"


def test_a_contribution_that_is_interrupted_before_its_upload_is_made_before_the_replica_leaves(
    tiny_group: MakeGroup,
) -> None:
    """The time for steps ends after the last step of round 2, before its contribution."""
    group = tiny_group(**SETTINGS)
    recorder = StepRecorder(group, at=7, whole=False)

    def leaves(member: Any, joined: Any) -> None:
        recorder.made[0].append(joined.data_step)
        if joined.data_step == 7:
            exchange = joined._loop.inflight._exchange
            shutdown = joined._shutdown

            def exchange_once(opened: Any) -> Any:
                if not shutdown.is_requested:
                    shutdown.share = 0.0
                    joined.leave(within_s=LONG_S)
                while shutdown.share < COMMIT_SHARE:
                    if shutdown.share == 0.0:
                        raise StopTraining(StopReason.LEFT)
                    time.sleep(0.001)
                time.sleep(0.02)  # so that the drain is in its last stage, in most trials
                return exchange(opened)

            joined._loop.inflight._exchange = exchange_once

    has_left = threading.Event()

    def hold(member: Any, joined: Any) -> None:
        if joined.data_step == 7:
            assert has_left.wait(600)
        if joined.data_step == 8:
            assert recorder.second_steps.wait(600)

    other = group.start(0, **COUNTING, on_step=hold)
    first = group.start(1, **COUNTING, on_step=leaves)
    group.wait(first)
    assert (first.error, first.reason) == (None, "left")
    has_left.set()
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    group.wait()
    group.assert_log()
    group.assert_agreed(other, second)
    assert_all_counted(group, recorder, other)


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

    def hold(member: Any, joined: Any) -> None:
        if joined.data_step == 7:
            assert waiting.wait(600)

    other = group.start(0, **COUNTING, on_step=hold)
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
    group = tiny_group(**SETTINGS, heartbeat_timeout_s=60.0)
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
    resumed = [group.start(replica, **COUNTING) for replica in range(2)]
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
