"""Events while rounds are in flight: no step counts twice, and no schedule goes back.

The model counts: each inner step lowers each weight by 1, the outer optimizer adds contributions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.errors import RunOver, StopReason, StopTraining
from diloco.exchange.inflight_rounds import InflightRounds
from diloco.store.base import StoreError
from diloco.training.dynamic_steps import DynamicLocalUpdates
from diloco.training.local_progress import MISSES
from tests.diloco.counting import COUNTING
from tests.diloco.training.leaving import planned_weight

MakeGroup = Callable[..., Any]
OVERLAPPING: dict[str, Any] = {
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "num_replicas": 1,
    "sync_every": 4,
    "num_fragments": 2,
    "overlap_steps": 3,
    "mixing_alpha": 1.0,
}


def test_work_discarded_in_flight_is_not_subtracted_again(
    tiny_group: MakeGroup,
) -> None:
    """Round 3 is open when round 4 finds NaN and the local weights are discarded."""
    group = tiny_group(**OVERLAPPING, total_rounds=10)

    def poison(member: Any, joined: Any) -> None:
        if member.steps == 8:  # the last step of round 4, of the other fragment
            with torch.no_grad():
                member.model.layers[1].weight.fill_(float("nan"))

    (member,) = [group.start(0, **COUNTING, on_step=poison)]
    group.wait()
    group.assert_agreed(member)
    ends = member.weights().tolist()
    assert [ends[0], ends[2]] == [planned_weight(group, 0)] * 2
    assert [ends[1], ends[3]] == [planned_weight(group, 1)] * 2


def test_dynamic_local_updates_never_send_a_fragment_in_flight(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step per round and five steps of overlap: the previous round must be applied first."""
    monkeypatch.setattr(DynamicLocalUpdates, "steps", lambda pace, replica, most: 1)
    group = tiny_group(
        **OVERLAPPING | {"num_fragments": 1, "sync_every": 6, "overlap_steps": 5},
        dylu="on",
        total_rounds=12,
    )
    member = group.start(0, **COUNTING)
    group.wait()
    group.assert_agreed(member)
    assert not any(group.plan(commit.round).refused for commit in group.commits())
    assert member.weights().tolist() == [planned_weight(group, 0)] * 4


def test_the_schedule_step_never_decreases(tiny_group: MakeGroup) -> None:
    group = tiny_group(**OVERLAPPING, total_rounds=10)
    steps: list[int] = []
    group.start(0, **COUNTING, on_step=lambda member, joined: steps.append(joined.schedule_step))
    group.wait()
    assert steps[:20] == list(range(20))
    assert steps == sorted(steps) and max(steps) <= group.settings.total_steps


def test_a_late_joiner_logs_no_missed_rounds(
    tiny_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group = tiny_group(num_replicas=1, total_rounds=20, checkpoint_every=100)
    reached, joins = threading.Event(), threading.Event()

    def watch(member: Any, joined: Any) -> None:
        if joined.round == 3 + MISSES:
            reached.set()
            assert joins.wait(600)

    def join_in(member: Any, joined: Any) -> None:
        if not joins.is_set():
            joined._lease.beat()  # from now on the rounds wait for it
            joins.set()

    group.start(0, on_step=watch)
    assert reached.wait(600)
    group.start(1, on_step=join_in)
    with caplog.at_level(logging.ERROR, logger="diloco.training.local_progress"):
        group.wait()
    assert "in a row" not in caplog.text


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (RunOver("round 8 was the last"), False),
        (StopTraining(StopReason.LEFT), False),
        (StoreError("the upload is denied"), True),
    ],
    ids=["over", "stopped", "failed"],
)
def test_only_failed_exchanges_are_logged_at_the_end(
    error: Exception, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    began = threading.Event()

    def exchange(opened: Any) -> Any:
        began.set()
        raise error

    inflight = InflightRounds(exchange, at_once=1)
    opened: Any = SimpleNamespace(round=9, sent=None)
    inflight.begin(opened)
    assert began.wait(600)
    assert inflight.end() == []
    assert (str(error) in caplog.text) is logged
