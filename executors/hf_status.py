"""What the Hub says of a job, as the executor says it.

The Hub has six stages and, for a job that failed, a sentence: ``Job timeout`` (documented), ``Job
failed with exit code: 1. Reason: Error`` and ``... exit code: 137. Reason: OOMKilled`` (reported by
its users). The reasons are those of Kubernetes, whose words for a machine that goes away are taken
for preemption; nobody has reported one, and the Hub promises none.
"""

from __future__ import annotations

import math
import re
from datetime import datetime

from huggingface_hub import JobInfo

from executors.base import Cause, JobState, ReplicaStatus

TIMEOUT_LABEL = "archipelago-timeout-s"

LIVE = ("SCHEDULING", "RUNNING")

LOST = ReplicaStatus(
    state=JobState.ENDED, cause=Cause.LOST, message="The Hub knows no such job.", phase="DELETED"
)

_EXIT_CODE = re.compile(r"exit code:? (\d+)")
_WORDS = (
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
    stage, said = str(job.status.stage), job.status.message or ""
    if stage == "DELETED":
        return LOST
    started_s = _seconds(job.started_at)
    ended = stage in ("COMPLETED", "CANCELED", "ERROR") or job.finished_at is not None
    timeout = (job.labels or {}).get(TIMEOUT_LABEL, "")
    deadline_s = started_s + int(timeout) if started_s and timeout.isdigit() else None
    if not ended:  # a stage that nobody knows yet is told by whether it has started
        running = stage == "RUNNING" or (stage not in LIVE and started_s is not None)
        return ReplicaStatus(
            state=JobState.RUNNING if running else JobState.PENDING,
            message=said,
            phase=stage,
            started_wall_s=started_s,
            deadline_wall_s=deadline_s,
        )
    code = _EXIT_CODE.search(said)
    ran_s = job.durations.running_secs if job.durations else None
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=_cause(stage, said),
        exit_code=0 if stage == "COMPLETED" else int(code[1]) if code else None,
        message=said,
        phase=stage,
        started_wall_s=started_s,
        ended_wall_s=_seconds(job.finished_at),
        deadline_wall_s=deadline_s,
        # By the minute: https://huggingface.co/docs/hub/jobs-pricing
        billed_s=None if ran_s is None else 60.0 * math.ceil(ran_s / 60),
    )


def precedence(job: JobInfo) -> tuple[int, float, str]:
    """Of several jobs of one launch key the least is the one: one that lives before one that
    ended by itself before one that was cancelled, then by age. So a job that the reaper cancelled
    never hides the one it left."""
    stage = str(job.status.stage)
    rank = 0 if stage in LIVE else 2 if stage in ("CANCELED", "DELETED") else 1
    return rank, _seconds(job.created_at) or 0.0, job.id


def _cause(stage: str, said: str) -> Cause:
    if stage == "COMPLETED":
        return Cause.DONE
    if stage == "CANCELED":
        return Cause.CANCELLED
    return next((cause for cause, words in _WORDS if words.search(said)), Cause.ERROR)


def _seconds(at: datetime | None) -> float | None:
    return at.timestamp() if at else None
