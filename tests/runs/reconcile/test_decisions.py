"""Decisions of the reconciler as tables: no database, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from executors.base import Cause, JobState
from runs.reconcile.decisions import (
    HeartbeatView,
    Job,
    ReplicaDecision,
    ReplicaView,
    RunView,
    decide_replica,
    decide_run,
)
from runs.states import REPLICA_ENDED, ReplicaState, RunState

R, S = ReplicaState, RunState
RUNNING = Job(state=JobState.RUNNING)
UNKNOWN = Job(state=JobState.UNKNOWN)
PREEMPTED, OOM = Cause.PREEMPTED, Cause.OUT_OF_MEMORY


def ended(cause: str, code: int | None = None, message: str = "") -> Job:
    return Job(state=JobState.ENDED, cause=cause, exit_code=code, message=message)


def fresh(state: str, message: str = "") -> HeartbeatView:
    return HeartbeatView(changed=True, state=state, message=message, interval_s=2.0)


def silent(age_s: float, interval_s: float = 2.0) -> HeartbeatView:
    return HeartbeatView(changed=False, state="computing", interval_s=interval_s, age_s=age_s)


def judge(state: ReplicaState, job: Job | None, beat: HeartbeatView | None, **more: Any) -> Any:
    return decide_replica(ReplicaView(state=state, job=job, beat=beat, **more))


@pytest.mark.parametrize("state", [R.PENDING, R.RESTARTING, *sorted(REPLICA_ENDED)])
def test_a_replica_without_a_job_is_not_changed(state: ReplicaState) -> None:
    assert judge(state, ended(Cause.ERROR, 1), fresh("computing")) is None


@pytest.mark.parametrize(
    ("state", "beat", "to"),
    [
        (R.PROVISIONING, fresh("syncing"), R.SYNCING),
        (R.COMPUTING, fresh("uploading"), R.UPLOADING),
        (R.SUSPECT, fresh("waiting"), R.WAITING),
        (R.COMPUTING, fresh("done"), R.DONE),
        (R.COMPUTING, fresh("computing"), None),
        (R.DRAINING, fresh("computing"), None),
        (R.DRAINING, fresh("done"), None),
        (R.COMPUTING, fresh("left"), None),
        (R.COMPUTING, fresh("dancing"), None),
        (
            R.COMPUTING,
            fresh("suspect"),
            None,
        ),  # a known state, but not one that a replica can report
        (R.PROVISIONING, None, None),
    ],
)
def test_a_replica_with_a_live_job_follows_its_heartbeat(
    state: ReplicaState, beat: HeartbeatView | None, to: ReplicaState | None
) -> None:
    decision = judge(state, RUNNING, beat)
    assert (decision.to if decision else None) == to


@pytest.mark.parametrize(("job", "to"), [(RUNNING, None), (UNKNOWN, R.FAILED), (None, R.FAILED)])
def test_a_reported_failure_counts_only_if_the_backend_is_unreachable(
    job: Job | None, to: ReplicaState | None
) -> None:
    decision = judge(R.COMPUTING, job, fresh("failed", "out of disk"))
    assert decision == (ReplicaDecision(to=to, reason="out of disk") if to else None)


@pytest.mark.parametrize(
    ("interval_s", "age_s", "suspect"),
    [
        (2.0, 5.9, False),
        (2.0, 6.1, True),
        (0.0, 14.0, False),  # reports no interval: the group's timeout applies
        (0.0, 15.1, True),
        (15.0, 29.9, False),  # no other replica waits for it
        (15.0, 30.1, True),
        (45.0, 59.9, False),  # in the middle of a long computation
        (600.0, 60.1, True),  # cannot excuse itself from the group's timeout
    ],
)
def test_silence_makes_suspect(interval_s: float, age_s: float, suspect: bool) -> None:
    decision = judge(R.COMPUTING, RUNNING, silent(age_s, interval_s), heartbeat_timeout_s=15.0)
    assert (decision is not None) == suspect
    if decision:
        assert decision.to == R.SUSPECT
        assert f"found none for {age_s:.0f} s; the backend reports running" in decision.reason


@pytest.mark.parametrize("state", [R.PROVISIONING, R.SUSPECT, R.DRAINING])
def test_silence_of_an_idle_replica_is_ignored(state: ReplicaState) -> None:
    assert judge(state, RUNNING, silent(1000)) is None


def test_silence_and_an_unknown_job_never_end_a_replica() -> None:
    decision = judge(R.COMPUTING, UNKNOWN, silent(10_000))
    assert decision.to == R.SUSPECT
    assert "the backend is unreachable" in decision.reason
    assert judge(R.SUSPECT, UNKNOWN, silent(10_000)) is None


@pytest.mark.parametrize(
    ("job", "beat", "over", "to", "reason"),
    [
        (ended(Cause.DONE, 0), fresh("done"), False, R.DONE, "finished"),
        (ended(Cause.DONE, 0), None, True, R.DONE, "finished"),
        (
            ended(Cause.DONE, 0),
            fresh("left", "moved"),
            False,
            R.LOST,
            "left before the run ended: moved",
        ),
        (
            ended(Cause.ERROR, 1, "no such data"),
            None,
            False,
            R.FAILED,
            "error, exit code 1: no such data",
        ),
        (
            ended(Cause.ERROR, 1),
            fresh("failed", "ValueError: x"),
            False,
            R.FAILED,
            "error, exit code 1: ValueError: x",
        ),
        (
            ended(Cause.ERROR, 1, "traceback"),
            fresh("computing"),
            True,
            R.FAILED,
            "error, exit code 1: traceback",
        ),
        (ended(OOM, -9), None, False, R.FAILED, "out of_memory, exit code -9"),
        (ended(Cause.DEADLINE), None, False, R.FAILED, "deadline"),
        (
            ended(Cause.ERROR, 75, "store away"),
            None,
            False,
            R.LOST,
            "error, exit code 75: store away",
        ),
        (ended(Cause.LOST), None, False, R.LOST, "lost"),
        (ended(PREEMPTED, -15), fresh("computing"), False, R.LOST, "preempted, exit code -15"),
        (ended(Cause.CANCELLED, -15), None, False, R.LOST, "cancelled, exit code -15"),
        (ended(Cause.CANCELLED, -15), None, True, R.EVICTED, "cancelled at the end of the run"),
    ],
)
def test_the_state_after_a_job_s_end(
    job: Job, beat: HeartbeatView | None, over: bool, to: ReplicaState, reason: str
) -> None:
    result = judge(R.COMPUTING, job, beat, run_is_over=over)
    assert result == ReplicaDecision(to=to, reason=reason)


@pytest.mark.parametrize("cause", list(Cause))
def test_a_draining_replica_is_evicted_for_any_cause(cause: Cause) -> None:
    assert judge(R.DRAINING, ended(cause, 1), None).to == R.EVICTED


# The run. Its quorum is 2 and its target 3.

W = R.COMPUTING


def judge_the_run(state: RunState, replicas: tuple[ReplicaState, ...], **more: Any) -> Any:
    values = {"training": True, "jobs_open": sum(r not in REPLICA_ENDED for r in replicas)}
    view = RunView(state=state, quorum=2, target=3, replicas=replicas, **(values | more))
    return decide_run(view)


@pytest.mark.parametrize(
    ("state", "replicas", "more", "to"),
    [
        (S.PROVISIONING, (W, W, W), {}, S.RUNNING),
        (S.PROVISIONING, (W, W, R.PROVISIONING), {"training": False}, None),
        (S.PROVISIONING, (W, W, R.PROVISIONING), {}, S.DEGRADED),
        (S.RUNNING, (W, W, R.SUSPECT), {}, S.DEGRADED),
        (S.RUNNING, (W, W, R.DRAINING), {}, S.RUNNING),
        (S.RUNNING, (W, R.SUSPECT, R.LOST), {}, S.STALLED),
        (S.DEGRADED, (W, W, R.RESTARTING), {}, S.DEGRADED),
        (S.STALLED, (W, W, W), {}, S.RUNNING),
        (S.RUNNING, (W, R.DONE, R.DONE), {}, S.RUNNING),
        (S.QUEUED, (R.PENDING,) * 3, {}, None),
        (S.STOPPING, (W, W, W), {}, None),
    ],
)
def test_the_state_of_a_run_by_its_replicas(
    state: RunState, replicas: tuple[ReplicaState, ...], more: dict[str, Any], to: RunState | None
) -> None:
    decision = judge_the_run(state, replicas, **more)
    assert (decision.to if decision else None) == to


@pytest.mark.parametrize(
    ("relaunchable", "hope"),
    [(1, "waiting for a relaunch"), (0, "restart a replica or stop the run")],
)
def test_a_stall_names_the_quorum_and_the_next_step(relaunchable: int, hope: str) -> None:
    decision = judge_the_run(S.RUNNING, (W, R.LOST, R.LOST), relaunchable=relaunchable)
    assert decision.reason == f"1 of 3 replicas live, below the quorum of 2: {hope}"


@pytest.mark.parametrize(
    ("round_s", "since_commit_s", "to"),
    [
        (None, 10_000.0, S.RUNNING),  # no round yet: nothing to compare with
        (5.0, 59.0, S.RUNNING),
        (5.0, 61.0, S.STALLED),
        (100.0, 199.0, S.RUNNING),
        (100.0, 201.0, S.STALLED),
    ],
)
def test_a_run_that_commits_nothing_is_stalled(
    round_s: float | None, since_commit_s: float, to: RunState
) -> None:
    decision = judge_the_run(S.RUNNING, (W,) * 3, round_s=round_s, since_commit_s=since_commit_s)
    assert decision.to == to


@pytest.mark.parametrize(
    ("state", "final_reason", "to", "reason"),
    [
        (S.RUNNING, "completed", S.SUCCEEDED, "completed at round 4"),
        (S.DEGRADED, "token_limit", S.SUCCEEDED, "token limit reached at round 4"),
        (S.STOPPING, "stopped", S.CANCELLED, "stopped by olga at round 4"),
        (S.STOPPING, "completed", S.SUCCEEDED, "completed at round 4"),
        (S.PROVISIONING, "completed", S.SUCCEEDED, "completed at round 4"),
    ],
)
def test_the_final_manifest_decides(
    state: RunState, final_reason: str, to: RunState, reason: str
) -> None:
    decision = judge_the_run(
        state,
        (W, R.FAILED, R.LOST),
        final_reason=final_reason,
        final_round=4,
        stop_reason="stopped by olga" if state == S.STOPPING else "",
    )
    assert (decision.to, decision.reason) == (to, reason)


def test_a_stop_without_a_final_manifest_ends_with_the_jobs() -> None:
    assert judge_the_run(S.STOPPING, (R.EVICTED,) * 3, jobs_open=1) is None
    decision = judge_the_run(S.STOPPING, (R.EVICTED,) * 3, stop_reason="stopped by olga")
    assert decision.to == S.CANCELLED
    assert decision.reason == "stopped by olga; no final weights were written"


def test_a_run_without_any_replica_left_has_failed() -> None:
    gone = (R.FAILED, R.LOST, R.EVICTED)
    decision = judge_the_run(S.STALLED, gone, first_error="replica 0: exit code 1")
    assert (decision.to, decision.reason) == (S.FAILED, "replica 0: exit code 1")
    assert "none wrote the final weights" in judge_the_run(S.RUNNING, (R.DONE,) * 3).reason
    assert judge_the_run(S.STALLED, gone, relaunchable=1).to == S.STALLED
    assert judge_the_run(S.STALLED, gone, jobs_open=1).to == S.STALLED


def test_the_time_limit_stops() -> None:
    assert judge_the_run(S.RUNNING, (W,) * 3, age_s=61, time_limit_s=60).to == S.STOPPING
    assert judge_the_run(S.RUNNING, (W,) * 3, age_s=60, time_limit_s=60).to == S.RUNNING
    assert judge_the_run(S.RUNNING, (W,) * 3, age_s=10**9, time_limit_s=0).to == S.RUNNING
