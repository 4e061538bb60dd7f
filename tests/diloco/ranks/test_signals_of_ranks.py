"""A shutdown request that only another rank has: when the leader acts on it, and how often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from diloco.membership.graceful_shutdown import STEP_SHARE, GracefulShutdown
from diloco.ranks.collective_ops import Ranks
from diloco.ranks.command_channel import StepMessage
from tests.diloco.clocks import ManualClock


class Leader:
    """The leader's side of the channel to one follower, whose shutdown request is ``follower``.

    ``answer`` is what the follower has written before; without one it writes when the leader does.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.follower = GracefulShutdown(self.clock)
        self.shutdown = GracefulShutdown(self.clock)
        self.shutdown.begun = True
        channel: Any = SimpleNamespace(is_leader=True, all_reduce=self._all_reduce)
        self.ranks = Ranks(channel, nn.Linear(1, 1), exchange=channel, storage=channel)
        self.ranks._clock = cast(Any, self.clock)
        self.ranks._last_message_s = self.ranks._counted_s = self.clock.now_s
        self.ranks.on_leaving = lambda within_s: self.shutdown.request(within_s=within_s)
        self.answer: StepMessage | None = None

    def _all_reduce(self, message: StepMessage) -> StepMessage:
        return message + (self.answer or self.written())

    def written(self) -> StepMessage:
        follower = self.follower
        return StepMessage(leaving=follower.is_requested, leave_within_s=follower.left_s)

    def end_step(self) -> None:
        self.ranks.count(tokens=1, loss=1.0)
        self.ranks.all_reduce(StepMessage())


def test_a_signal_in_a_step_that_is_longer_than_its_time_keeps_its_time() -> None:
    leader = Leader()
    leader.clock.now_s += 39.0
    leader.follower.request(within_s=30.0)
    leader.clock.now_s += 1.0
    leader.end_step()
    assert leader.shutdown.left_s == pytest.approx(29.0)


def test_the_share_for_steps_begins_once() -> None:
    """The time between messages grows, so each could mean an earlier deadline than the last one."""
    leader = Leader()
    start_s = leader.clock.now_s
    leader.follower.request(within_s=600.0)
    pause_s = 1.0
    while not leader.shutdown.is_over(STEP_SHARE):
        leader.clock.now_s += pause_s
        pause_s *= 1.01
        leader.ranks.all_reduce(StepMessage())
    assert leader.clock.now_s - start_s < 0.55 * 600.0


def test_a_leader_that_waited_assumes_the_earliest_deadline() -> None:
    """The follower has written its part of the message right after the one before."""
    leader = Leader()
    leader.end_step()
    leader.follower.request(within_s=30.0)
    leader.answer = leader.written()
    leader.clock.now_s += 10.0
    leader.ranks.all_reduce(StepMessage())
    assert leader.shutdown.left_s == pytest.approx(20.0)
