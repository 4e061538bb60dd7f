"""Replica 1 leaves and continues in another process: what tests of graceful shutdown share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from diloco.protocol import keys
from diloco.protocol.records import Command, Heartbeat
from tests.diloco.counting import COUNTING

MakeGroup = Callable[..., Any]

LONG_S = 3000.0
"""A minute of real time on the tests' clock: a test that waits this long fails."""

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


def wait_at(events: Mapping[int, threading.Event]) -> Callable[[Any, Any], None]:
    """Return a callback of a replica that waits at each of these data steps for an event."""

    def on_step(member: Any, joined: Any) -> None:
        if event := events.get(joined.data_step):
            assert event.wait(600)

    return on_step


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


def leave_and_return(
    group: Any, recorder: StepRecorder, leaves: Callable[[Any, Any], None]
) -> tuple[Any, Any]:
    """Train with replica 0 and a process of replica 1 that ``leaves``, then with its next one;
    return both members, whose weights are the same."""
    other = group.start(0, **COUNTING, on_step=recorder.other_replica)
    first = group.start(1, **COUNTING, on_step=leaves)
    group.wait(first)
    assert (first.error, first.reason) == (None, "left")
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    group.wait()
    group.assert_log()
    group.assert_agreed(other, second)
    return other, second
