"""Convert the Hub's job information into a :class:`~executors.base.ReplicaStatus`.

The Hub has six stages, of which :data:`ENDED` are final. An unknown stage is not an end: its job
counts as running, or as pending if it has not started, and the status shows the stage's name.
A failed job has a message: ``Job timeout`` (documented), ``Job failed with exit code: 1. Reason:
Error`` and ``... exit code: 137. Reason: OOMKilled`` (reported by users). The reasons are those of
Kubernetes; reasons for a lost node count as preemption. The Hub documents none of these, and no
user has reported one.
"""

from __future__ import annotations

import math
import re
from datetime import datetime

from huggingface_hub import JobInfo

from executors.base import Cause, JobState, PendingCause, ReplicaStatus
from executors.launching import exit_cause
from executors.refusals import is_capacity_message

TIMEOUT_LABEL = "archipelago-timeout-s"

LIVE = ("SCHEDULING", "RUNNING")
ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
"""``huggingface_hub._jobs_api.TERMINAL_JOB_STAGES``."""

LOST = ReplicaStatus(
    state=JobState.ENDED, cause=Cause.LOST, message="The Hub has no such job.", phase="DELETED"
)

_EXIT_CODE = re.compile(r"exit code:? (\d+)")
_PATTERNS = (
    (Cause.DEADLINE, re.compile(r"\btime(d )?out\b", re.IGNORECASE)),
    (Cause.OUT_OF_MEMORY, re.compile(r"OOM|out of memory|memory limit", re.IGNORECASE)),
    (
        Cause.PREEMPTED,
        re.compile(
            r"Reason: (Evicted|Preempt\w*|NodeLost|NodeShutdown|DeletionByTaintManager|Shutdown)"
        ),
    ),
)


def status_of(job: JobInfo) -> ReplicaStatus:
    stage, message = str(job.status.stage), job.status.message or ""
    if stage == "DELETED":
        return LOST
    started_s = _seconds(job.started_at)
    is_known = stage in (*LIVE, *ENDED)
    timeout = (job.labels or {}).get(TIMEOUT_LABEL, "")
    deadline_s = started_s + int(timeout) if started_s and timeout.isdigit() else None
    if stage not in ENDED:
        running = stage == "RUNNING" or (not is_known and started_s is not None)
        if not is_known:
            message = f"the Hub reports an unknown stage, {stage}: {message}".removesuffix(": ")
        return ReplicaStatus(
            state=JobState.RUNNING if running else JobState.PENDING,
            message=message,
            phase=stage,
            pending=None if running else _pending_cause(message),
            started_wall_s=started_s,
            deadline_wall_s=deadline_s,
        )
    code = _EXIT_CODE.search(message)
    exit_code = 0 if stage == "COMPLETED" else int(code[1]) if code else None
    cause, explanation = _cause(stage, message, exit_code)
    ran_s = job.durations.running_secs if job.durations else None
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=cause,
        exit_code=exit_code,
        message=message or explanation,
        phase=stage,
        started_wall_s=started_s,
        ended_wall_s=_seconds(job.finished_at),
        deadline_wall_s=deadline_s,
        # Billed by the minute: https://huggingface.co/docs/hub/jobs-pricing
        billed_s=None if ran_s is None else 60.0 * math.ceil(ran_s / 60),
    )


def precedence(job: JobInfo) -> tuple[int, float, str]:
    """Sort key for several jobs of one launch key; the smallest represents the key.

    Live jobs come first, then jobs that ended by themselves, then cancelled ones; older jobs come
    before younger ones. A duplicate that the reaper cancelled therefore never hides the other.
    """
    stage = str(job.status.stage)
    rank = 0 if stage not in ENDED else 2 if stage in ("CANCELED", "DELETED") else 1
    return rank, _seconds(job.created_at) or 0.0, job.id


def _pending_cause(message: str) -> PendingCause:
    """The Hub reports a full flavour only in the message of a job's status, if at all."""
    return PendingCause.CAPACITY if is_capacity_message(message) else PendingCause.STARTING


def _cause(stage: str, message: str, exit_code: int | None) -> tuple[Cause, str]:
    reported = next((cause for cause, pattern in _PATTERNS if pattern.search(message)), None)
    return exit_cause(
        exit_code,
        out_of_memory=reported is Cause.OUT_OF_MEMORY
        or (None if "Reason:" not in message else False),
        cancelled=stage == "CANCELED",
        preempted=reported is Cause.PREEMPTED,
        deadline=reported is Cause.DEADLINE,
    )


def _seconds(at: datetime | None) -> float | None:
    return at.timestamp() if at else None
