"""A drain while exchanges are in flight: they are resumed, and nothing is contributed twice."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from diloco.errors import StopReason, StopTraining
from diloco.membership.graceful_shutdown import BASE_SHARE, COMMIT_SHARE
from diloco.store.base import StoreError
from tests.diloco.counting import COUNTING
from tests.diloco.training.leaving import (
    LONG_S,
    OVERLAP,
    SETTINGS,
    SEVERAL_OPEN,
    MakeGroup,
    StepRecorder,
    assert_all_counted,
    leave_and_return,
    wait_at,
)


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

    leave_and_return(group, recorder, leaves)
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

    other = group.start(0, **COUNTING, on_step=wait_at({7: has_left, 8: recorder.second_steps}))
    first = group.start(1, **COUNTING, on_step=leaves)
    group.wait(first)
    assert (first.error, first.reason) == (None, "left")
    has_left.set()
    second = group.start(1, **COUNTING, on_step=recorder.second_process)
    group.wait()
    group.assert_log()
    group.assert_agreed(other, second)
    assert_all_counted(group, recorder, other)


def test_an_early_contribution_is_made_once_if_its_stage_is_resumed(tiny_group: MakeGroup) -> None:
    """The upload of round 4 is interrupted after the drain has raised the share for its second
    stage, which has contributed to round 5 meanwhile."""
    group = tiny_group(**{**SETTINGS, **SEVERAL_OPEN})
    recorder = StepRecorder(group, at=7, whole=True)
    contributed: list[int] = []

    def leaves(member: Any, joined: Any) -> None:
        if joined.data_step == 7:
            loop = joined._loop
            exchange, contribute = loop.inflight._exchange, loop._exchange.contribute
            interrupted: list[int] = []

            def exchange_once(opened: Any) -> Any:
                if not interrupted:
                    interrupted.append(opened.round)
                    while 5 not in contributed:
                        time.sleep(0.001)
                    raise StopTraining(StopReason.LEFT)
                return exchange(opened)

            def recorded(round: int, **arguments: Any) -> Any:
                sent = contribute(round, **arguments)
                contributed.append(round)
                return sent

            loop.inflight._exchange, loop._exchange.contribute = exchange_once, recorded
        recorder.first_process(member, joined)

    leave_and_return(group, recorder, leaves)
    assert sorted(round for round in contributed if round > 3) == [4, 5]
    assert group.commits()[-1].tokens_total == 2 * 8 * 16


def test_a_leaving_replica_does_not_wait_for_the_commit_of_an_early_contribution(
    tiny_group: MakeGroup,
) -> None:
    """The contribution of the process before is durable, and the time is longer than the test's."""
    group = tiny_group(**SETTINGS)
    recorder = StepRecorder(group, at=5, whole=False)
    has_left = threading.Event()

    other = group.start(0, **COUNTING, on_step=wait_at({5: has_left}))
    first = group.start(1, **COUNTING, on_step=recorder.first_process)
    group.wait(first)

    def leaves(member: Any, joined: Any) -> None:
        recorder.made[1].append(joined.data_step)
        if joined.data_step == 7:
            loop = joined._loop
            settle = loop._settle

            def settle_late(opened: Any) -> Any:
                joined._shutdown.share = 0.0
                joined.leave(within_s=100 * LONG_S)
                loop._settle = settle
                return settle(opened)

            loop._settle = settle_late

    second = group.start(1, **COUNTING, on_step=leaves)
    group.wait(second)
    has_left.set()
    assert (second.error, second.reason) == (None, "left")
    third = group.start(1, **COUNTING)
    group.wait()
    group.assert_agreed(other, third)


def test_the_error_of_an_exchange_during_the_drain_is_logged(
    tiny_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group = tiny_group(**SETTINGS)
    has_left = threading.Event()

    def leaves(member: Any, joined: Any) -> None:
        if joined.data_step == 7:
            shutdown = joined._shutdown

            def fails(opened: Any) -> Any:
                if not shutdown.is_requested:
                    shutdown.share = 0.0
                    joined.leave(within_s=LONG_S)
                    raise StopTraining(StopReason.LEFT)
                raise StoreError("the upload is denied")

            joined._loop.inflight._exchange = fails

    other = group.start(0, **COUNTING, on_step=wait_at({7: has_left}))
    first = group.start(1, **COUNTING, on_step=leaves)
    group.wait(first)
    has_left.set()
    group.wait(other)
    assert (first.error, first.reason) == (None, "left")
    assert "the upload is denied" in caplog.text
