"""Decides the next state of replicas and runs: pure functions without clock or I/O.

Liveness is measured by the observer's clock: how long a heartbeat has not *changed*. The replica's
clock plays no part (invariant I5). Unknown is not failed: an unreachable backend never ends a
replica, and a silent replica is only *suspect* until its backend reports that the job has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.control_pace import calm_bound_s
from executors.base import Cause, JobState
from runs.states import (
    REPLICA_ENDED,
    REPLICA_WORKING,
    RUN_LIVE,
    ReplicaState,
    RunState,
)

SUSPECT_AFTER_BEATS = 3.0
SLOW_START_S = 120.0
STALL_FLOOR_S = 60.0
"""Shortest time without a commit after which a run is *stalled*."""

EX_TEMPFAIL = 75
"""Exit code of a replica that gave up temporarily."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The status of the replica's current attempt, as its backend just reported it."""

    state: JobState
    cause: str = ""
    exit_code: int | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class HeartbeatView:
    """The replica's newest heartbeat. ``changed``: it differs from the one seen in the last
    tick."""

    changed: bool
    state: str
    message: str = ""
    interval_s: float = 0.0
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """A replica as this tick sees it."""

    state: ReplicaState
    job: Job | None = None
    beat: HeartbeatView | None = None
    heartbeat_timeout_s: float = 15.0
    run_is_over: bool = False
    """There is a final manifest, or the run was asked to stop, or it has ended."""
    bucket_was_read: bool = True
    """Without the bucket it is unknown whether the job exited before or after the run's end."""
    bucket_was_given_up: bool = False
    """Control stopped waiting for the bucket; ``bucket_was_read`` is then true, too."""


@dataclass(frozen=True, kw_only=True)
class ReplicaDecision:
    """Move the replica to ``to`` because of ``reason``."""

    to: ReplicaState
    reason: str


def decide_replica(view: ReplicaView) -> ReplicaDecision | None:
    """The state that the replica should change to; None for no change."""
    if view.state in (ReplicaState.PENDING, ReplicaState.EVICTED, ReplicaState.DONE):
        return None
    if view.state == ReplicaState.RESTARTING or view.state in REPLICA_ENDED:
        return None
    if view.job is not None and view.job.state == JobState.ENDED:
        return _decide_after_exit(view, view.job)
    if view.beat is None:
        return None
    if view.beat.changed:
        return _decide_by_heartbeat(view, view.beat)
    return _decide_by_silence(view, view.beat)


def _decide_after_exit(view: ReplicaView, job: Job) -> ReplicaDecision | None:
    reported = view.beat.message if view.beat else ""
    detail = job.message or reported
    if view.state == ReplicaState.DRAINING:
        return ReplicaDecision(to=ReplicaState.EVICTED, reason=f"stopped{_tail(detail)}")
    if job.cause == Cause.DONE:
        if not (view.run_is_over or view.bucket_was_read):
            return None
        if view.run_is_over or (view.beat is not None and view.beat.state == "done"):
            return ReplicaDecision(to=ReplicaState.DONE, reason="finished")
        if view.bucket_was_given_up:
            return ReplicaDecision(
                to=ReplicaState.DONE,
                reason="its job ended without an error; the rendezvous could not be read",
            )
        return ReplicaDecision(
            to=ReplicaState.LOST, reason=f"left before the run ended{_tail(detail)}"
        )
    if job.cause == Cause.CANCELLED and view.run_is_over:
        return ReplicaDecision(to=ReplicaState.EVICTED, reason="cancelled at the end of the run")
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    reason = f"{job.cause or 'ended'}{code}{_tail(detail)}".replace("_", " ", 1)
    if job.cause in (Cause.LOST, Cause.PREEMPTED, Cause.CANCELLED) or job.exit_code == EX_TEMPFAIL:
        return ReplicaDecision(to=ReplicaState.LOST, reason=reason)
    return ReplicaDecision(to=ReplicaState.FAILED, reason=reason)


def _tail(detail: str) -> str:
    return f": {detail}" if detail else ""


def _decide_by_heartbeat(view: ReplicaView, beat: HeartbeatView) -> ReplicaDecision | None:
    if view.state == ReplicaState.DRAINING:
        return None
    if beat.state == "done":
        return ReplicaDecision(to=ReplicaState.DONE, reason=beat.message or "finished")
    if beat.state == "failed" and (view.job is None or view.job.state == JobState.UNKNOWN):
        # The backend is unreachable, so the replica's own report has to do.
        return ReplicaDecision(to=ReplicaState.FAILED, reason=beat.message or "failed")
    if beat.state in REPLICA_WORKING and beat.state != view.state:
        return ReplicaDecision(to=ReplicaState(beat.state), reason=beat.message)
    return None  # "failed" and "left": the backend will report how the job ended


def _decide_by_silence(view: ReplicaView, beat: HeartbeatView) -> ReplicaDecision | None:
    if view.state not in REPLICA_WORKING:
        return None
    interval_s = beat.interval_s or view.heartbeat_timeout_s / SUSPECT_AFTER_BEATS
    limit_s = min(SUSPECT_AFTER_BEATS * interval_s, view.heartbeat_timeout_s)
    limit_s += calm_bound_s(interval_s, view.heartbeat_timeout_s)
    if beat.age_s <= limit_s:
        return None
    status = "is unreachable"
    if view.job is not None and view.job.state != JobState.UNKNOWN:
        status = f"reports {view.job.state}"
    return ReplicaDecision(
        to=ReplicaState.SUSPECT,
        reason=f"expected a heartbeat every {interval_s:g} s, found none for {beat.age_s:.0f} s; "
        f"the backend {status}",
    )


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The run as this tick sees it, after its replicas were updated."""

    state: RunState
    quorum: int
    target: int
    replicas: tuple[ReplicaState, ...]
    training: bool = False
    """A step was reported."""
    resuming: bool = False
    """The run was resumed and has not reached its earlier state yet."""
    final_reason: str = ""
    """``reason`` of the final manifest; '' if there is none."""
    final_round: int = 0
    is_settled: bool = True
    """Everything in the bucket was read, or control stopped waiting for it: the end of the run can
    be decided."""
    unknown: str = ""
    """Why the progress of the run is unknown; '' if it is known."""
    jobs_open: int = 0
    """Attempts that can still be running."""
    relaunchable: int = 0
    """Replicas that are pending, restarting, or will be relaunched."""
    first_error: str = ""
    stop_reason: str = ""
    age_s: float = 0.0
    time_limit_s: int = 0
    start_timeout_s: int = 0
    cost_usd: float = 0.0
    budget_usd: float = 0.0
    since_commit_s: float = 0.0
    round_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunDecision:
    """Move the run to ``to`` because of ``reason``."""

    to: RunState
    reason: str


def decide_run(view: RunView) -> RunDecision | None:
    """The state that the run should have; None for no change."""
    if view.final_reason and view.is_settled:
        return _finished(view)
    over = view.jobs_open == 0 and view.relaunchable == 0 and view.is_settled
    if view.state == RunState.STOPPING:
        if view.jobs_open == 0 and view.is_settled:
            return RunDecision(
                to=RunState.CANCELLED,
                reason=f"{view.stop_reason or 'stopped'}; no final weights were written",
            )
        return None
    if view.state == RunState.PAUSING and view.jobs_open == 0:
        return RunDecision(to=RunState.PAUSED, reason="all machines are released")
    if view.state not in RUN_LIVE | {RunState.PROVISIONING}:
        return None
    if over and view.replicas and all(state in REPLICA_ENDED for state in view.replicas):
        return RunDecision(
            to=RunState.FAILED,
            reason=view.first_error
            or "all replicas have ended and none wrote the final weights"
            + (f"; {view.unknown}" if view.unknown else ""),
        )
    if view.time_limit_s and view.age_s > view.time_limit_s:
        return RunDecision(
            to=RunState.STOPPING, reason=f"time limit of {view.time_limit_s} s reached"
        )
    if view.budget_usd and view.cost_usd >= view.budget_usd:
        return RunDecision(to=RunState.STOPPING, reason=f"budget of ${view.budget_usd:.2f} reached")
    if view.start_timeout_s and not view.training and view.age_s > view.start_timeout_s:
        working = sum(state in REPLICA_WORKING for state in view.replicas)
        return RunDecision(
            to=RunState.STOPPING,
            reason=f"expected a first step within {view.start_timeout_s} s, found {working} of "
            f"{view.target} replicas working",
        )
    if view.final_reason:
        return None  # it ends after the remaining rounds are read
    return _by_live_count(view)


def _finished(view: RunView) -> RunDecision:
    at = f"at round {view.final_round}"
    if view.final_reason == "stopped":
        return RunDecision(to=RunState.CANCELLED, reason=f"{view.stop_reason or 'stopped'} {at}")
    result = "token limit reached" if view.final_reason == "token_limit" else "completed"
    return RunDecision(to=RunState.SUCCEEDED, reason=f"{result} {at}")


def _by_live_count(view: RunView) -> RunDecision | None:
    if view.unknown:  # old data cannot prove that the run is healthy
        was_healthy = view.state == RunState.RUNNING
        return RunDecision(to=RunState.DEGRADED if was_healthy else view.state, reason=view.unknown)
    done = sum(state == ReplicaState.DONE for state in view.replicas)
    live = sum(
        state in REPLICA_WORKING or state == ReplicaState.DRAINING for state in view.replicas
    )
    if live + done >= view.target:
        limit_s = max(STALL_FLOOR_S, 2 * (view.round_s or 0.0))
        if view.round_s is not None and view.since_commit_s > limit_s:
            return RunDecision(
                to=RunState.STALLED,
                reason=f"no round was committed for {limit_s:.0f} s, "
                f"expected one every {view.round_s:.0f} s",
            )
        return RunDecision(
            to=RunState.RUNNING, reason=f"{view.target} of {view.target} replicas live"
        )
    if not view.training and view.state == RunState.PROVISIONING:
        return None
    if live + done >= view.quorum:
        return RunDecision(to=RunState.DEGRADED, reason=f"{live} of {view.target} replicas live")
    if view.resuming and (view.relaunchable or view.jobs_open):
        return None
    next_step = (
        "waiting for a relaunch" if view.relaunchable else "restart a replica or stop the run"
    )
    return RunDecision(
        to=RunState.STALLED,
        reason=f"{live} of {view.target} replicas live, below the quorum of {view.quorum}: "
        f"{next_step}",
    )
