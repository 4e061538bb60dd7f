"""What the reconciler concludes from what it saw: pure functions, no clock, no I/O.

Liveness is judged on the observer's own clock, from how long a beat has not *changed*; what a
replica says the time is plays no part (invariant I5). Unknown is not failed: a backend that could
not be asked never ends a replica, and a silent replica is *suspect* until its backend says that the
job is over.
"""

from __future__ import annotations

from dataclasses import dataclass

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
"""A run is never called stalled for want of a commit sooner than this."""

TRY_LATER = 75
"""Exit code (EX_TEMPFAIL) of a replica that gave up for now."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the backend said of the replica's current attempt just now."""

    state: JobState
    cause: str = ""
    exit_code: int | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class BeatView:
    """The replica's newest beat. ``changed``: it is not the one seen last time."""

    changed: bool
    state: str
    message: str = ""
    interval_s: float = 0.0
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    state: ReplicaState
    job: Job | None = None
    beat: BeatView | None = None
    heartbeat_timeout_s: float = 15.0
    run_is_over: bool = False
    """A final manifest is there, or the run was asked to stop, or has ended."""
    bucket_was_read: bool = True
    """Without the bucket it is unknown whether a clean exit came after the run's end."""
    bucket_is_given_up: bool = False
    """The bucket could not be read for long; ``bucket_was_read`` is then true as well."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Move to ``to`` because of ``reason``."""

    to: ReplicaState
    reason: str


def judge_replica(view: ReplicaView) -> Verdict | None:
    """Where the replica should go, None to leave it."""
    if view.state in (ReplicaState.PENDING, ReplicaState.EVICTED, ReplicaState.DONE):
        return None
    if view.state == ReplicaState.RESTARTING or view.state in REPLICA_ENDED:
        return None
    if view.job is not None and view.job.state == JobState.ENDED:
        return _after_the_end(view, view.job)
    if view.beat is None:
        return None
    if view.beat.changed:
        return _by_beat(view, view.beat)
    return _by_silence(view, view.beat)


def _after_the_end(view: ReplicaView, job: Job) -> Verdict | None:
    said = view.beat.message if view.beat else ""
    detail = job.message or said
    if view.state == ReplicaState.DRAINING:
        return Verdict(to=ReplicaState.EVICTED, reason=f"stopped{_tail(detail)}")
    if job.cause == Cause.DONE:
        if not (view.run_is_over or view.bucket_was_read):
            return None
        if view.run_is_over or (view.beat is not None and view.beat.state == "done"):
            return Verdict(to=ReplicaState.DONE, reason="finished")
        if view.bucket_is_given_up:
            return Verdict(
                to=ReplicaState.DONE,
                reason="its job ended without an error; the rendezvous could not be read",
            )
        return Verdict(to=ReplicaState.LOST, reason=f"left before the run was over{_tail(detail)}")
    if job.cause == Cause.CANCELLED and view.run_is_over:
        return Verdict(to=ReplicaState.EVICTED, reason="cancelled at the end of the run")
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    words = f"{job.cause or 'ended'}{code}{_tail(detail)}".replace("_", " ", 1)
    if job.cause in (Cause.LOST, Cause.PREEMPTED, Cause.CANCELLED) or job.exit_code == TRY_LATER:
        return Verdict(to=ReplicaState.LOST, reason=words)
    return Verdict(to=ReplicaState.FAILED, reason=words)


def _tail(detail: str) -> str:
    return f": {detail}" if detail else ""


def _by_beat(view: ReplicaView, beat: BeatView) -> Verdict | None:
    if view.state == ReplicaState.DRAINING:
        return None
    if beat.state == "done":
        return Verdict(to=ReplicaState.DONE, reason=beat.message or "finished")
    if beat.state == "failed" and (view.job is None or view.job.state == JobState.UNKNOWN):
        # Nobody else can tell how the job is, so the replica's own word has to do.
        return Verdict(to=ReplicaState.FAILED, reason=beat.message or "failed")
    if beat.state in REPLICA_WORKING and beat.state != view.state:
        return Verdict(to=ReplicaState(beat.state), reason=beat.message)
    return None  # "failed" and "left": the backend will say how the job ended


def _by_silence(view: ReplicaView, beat: BeatView) -> Verdict | None:
    if view.state not in REPLICA_WORKING:
        return None
    interval_s = beat.interval_s or view.heartbeat_timeout_s / SUSPECT_AFTER_BEATS
    limit_s = min(SUSPECT_AFTER_BEATS * interval_s, view.heartbeat_timeout_s)
    if beat.age_s <= limit_s:
        return None
    backend = "cannot be asked"
    if view.job is not None and view.job.state != JobState.UNKNOWN:
        backend = f"says {view.job.state}"
    return Verdict(
        to=ReplicaState.SUSPECT,
        reason=f"expected a beat every {interval_s:g} s, found none for {beat.age_s:.0f} s; "
        f"the backend {backend}",
    )


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The run as this tick found it, replicas already judged."""

    state: RunState
    quorum: int
    target: int
    replicas: tuple[ReplicaState, ...]
    training: bool = False
    """A step has been seen."""
    resuming: bool = False
    """It is launched once more and has not come so far yet."""
    final_reason: str = ""
    """``reason`` of the final manifest, '' while there is none."""
    final_round: int = 0
    is_settled: bool = True
    """All that is in the bucket was read, or control has waited long enough for it: the end of the
    run can be decided."""
    unknown: str = ""
    """Why the progress of the run is unknown, '' where it is known."""
    jobs_open: int = 0
    """Attempts that may still run."""
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
class RunVerdict:
    to: RunState
    reason: str


def judge_run(view: RunView) -> RunVerdict | None:
    """The state the run should have; None to leave it as it is."""
    if view.final_reason and view.is_settled:
        return _finished(view)
    over = view.jobs_open == 0 and view.relaunchable == 0 and view.is_settled
    if view.state == RunState.STOPPING:
        if view.jobs_open == 0 and view.is_settled:
            return RunVerdict(
                to=RunState.CANCELLED,
                reason=f"{view.stop_reason or 'stopped'}; no final weights were written",
            )
        return None
    if view.state == RunState.PAUSING and view.jobs_open == 0:
        return RunVerdict(to=RunState.PAUSED, reason="all machines are released")
    if view.state not in RUN_LIVE | {RunState.PROVISIONING}:
        return None
    if over and view.replicas and all(state in REPLICA_ENDED for state in view.replicas):
        return RunVerdict(
            to=RunState.FAILED,
            reason=view.first_error
            or "all replicas have ended and none wrote the final weights"
            + (f"; {view.unknown}" if view.unknown else ""),
        )
    if view.time_limit_s and view.age_s > view.time_limit_s:
        return RunVerdict(
            to=RunState.STOPPING, reason=f"time limit of {view.time_limit_s} s reached"
        )
    if view.budget_usd and view.cost_usd >= view.budget_usd:
        return RunVerdict(to=RunState.STOPPING, reason=f"budget of ${view.budget_usd:.2f} reached")
    if view.start_timeout_s and not view.training and view.age_s > view.start_timeout_s:
        came = sum(state in REPLICA_WORKING for state in view.replicas)
        return RunVerdict(
            to=RunState.STOPPING,
            reason=f"expected a first step within {view.start_timeout_s} s, found {came} of "
            f"{view.target} replicas there",
        )
    if view.final_reason:
        return None  # it is over once the rest of its rounds is read
    return _by_live_count(view)


def _finished(view: RunView) -> RunVerdict:
    at = f"at round {view.final_round}"
    if view.final_reason == "stopped":
        return RunVerdict(to=RunState.CANCELLED, reason=f"{view.stop_reason or 'stopped'} {at}")
    words = "token limit reached" if view.final_reason == "token_limit" else "completed"
    return RunVerdict(to=RunState.SUCCEEDED, reason=f"{words} {at}")


def _by_live_count(view: RunView) -> RunVerdict | None:
    if view.unknown:  # what was seen last does not make the run healthy
        healthy = view.state == RunState.RUNNING
        return RunVerdict(to=RunState.DEGRADED if healthy else view.state, reason=view.unknown)
    done = sum(state == ReplicaState.DONE for state in view.replicas)
    live = sum(
        state in REPLICA_WORKING or state == ReplicaState.DRAINING for state in view.replicas
    )
    if live + done >= view.target:
        limit_s = max(STALL_FLOOR_S, 2 * (view.round_s or 0.0))
        if view.round_s is not None and view.since_commit_s > limit_s:
            return RunVerdict(
                to=RunState.STALLED,
                reason=f"no round was committed for {limit_s:.0f} s, "
                f"expected one every {view.round_s:.0f} s",
            )
        return RunVerdict(
            to=RunState.RUNNING, reason=f"{view.target} of {view.target} replicas live"
        )
    if not view.training and view.state == RunState.PROVISIONING:
        return None
    if live + done >= view.quorum:
        return RunVerdict(to=RunState.DEGRADED, reason=f"{live} of {view.target} replicas live")
    if view.resuming and (view.relaunchable or view.jobs_open):
        return None
    hope = "waiting for a relaunch" if view.relaunchable else "restart a replica or stop the run"
    return RunVerdict(
        to=RunState.STALLED,
        reason=f"{live} of {view.target} replicas live, below the quorum of {view.quorum}: {hope}",
    )
