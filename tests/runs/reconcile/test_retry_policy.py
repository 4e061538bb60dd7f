"""The retry policy as tables: no database, no clock."""

from __future__ import annotations

import pytest

from executors.base import Cause
from runs.reconcile import retry_policy
from runs.reconcile.retry_policy import EX_CONFIG, REFUSED, relaunch_delay_s, restarts_after
from runs.states import ReplicaState as R


@pytest.mark.parametrize(
    ("state", "restarts", "cause", "delay_s"),
    [
        (R.FAILED, 0, "error", 2.0),
        (R.LOST, 1, "lost", 4.0),
        (R.FAILED, 2, "error", 8.0),
        (R.FAILED, 3, "error", None),
        (R.LOST, 3, "preempted", 16.0),
        (R.LOST, 9, "deadline", 60.0),
        (R.FAILED, 0, REFUSED, None),
        (R.DONE, 0, "done", None),
        (R.EVICTED, 0, "cancelled", None),
        (R.COMPUTING, 0, "", None),
    ],
)
def test_relaunches_back_off_and_end(
    state: R, restarts: int, cause: str, delay_s: float | None
) -> None:
    assert relaunch_delay_s(state, restarts=restarts, cause=cause) == delay_s


def test_a_permanent_error_is_not_restarted() -> None:
    delays = [
        relaunch_delay_s(R.FAILED, restarts=0, cause="error", exit_code=code)
        for code in (1, 75, EX_CONFIG)
    ]
    assert delays == [2.0, 2.0, None]


def test_the_backoff_is_capped_and_never_overflows() -> None:
    for restarts in (40, 10**6):
        delay_s = relaunch_delay_s(R.FAILED, restarts=restarts, cause="error", max_restarts=10**7)
        assert delay_s == retry_policy.BACKOFF_CAP_S


@pytest.mark.parametrize(
    ("cause", "worked_s", "after"),
    [
        ("error", 0.0, 3),
        ("error", retry_policy.FORGIVE_AFTER_S - 1, 3),
        ("error", retry_policy.FORGIVE_AFTER_S, 1),
        (Cause.PREEMPTED, 5.0, 2),
        (Cause.PREEMPTED, retry_policy.FORGIVE_AFTER_S, 0),
        (Cause.DEADLINE, 5.0, 2),
    ],
)
def test_failures_in_a_row_are_counted_and_reset(cause: str, worked_s: float, after: int) -> None:
    assert restarts_after(2, cause=cause, worked_s=worked_s) == after


@pytest.mark.parametrize(
    ("round_s", "drain_s"), [(None, 30.0), (4.0, 30.0), (100.0, 200.0), (3600.0, 600.0)]
)
def test_the_drain_time_is_two_rounds_within_bounds(round_s: float | None, drain_s: float) -> None:
    assert retry_policy.drain_s(round_s) == drain_s


@pytest.mark.parametrize(
    ("round_s", "lifetime_s", "margin_s"),
    [(None, 86_400, 60.0), (100.0, 86_400, 200.0), (3600.0, 86_400, 600.0), (None, 100, 25.0)],
)
def test_a_replacement_starts_in_time_and_uses_at_most_a_quarter_of_the_lifetime(
    round_s: float | None, lifetime_s: float, margin_s: float
) -> None:
    assert retry_policy.replace_s(round_s, lifetime_s) == margin_s
