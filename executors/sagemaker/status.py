"""Convert a DescribeTrainingJob response into a :class:`~executors.base.ReplicaStatus`. Pure.

The states are those of docs.aws.amazon.com/sagemaker/latest/APIReference/
API_DescribeTrainingJob.html; the developer guide describes managed spot jobs under "Managed Spot
Training Lifecycle"::

    Starting > Downloading > Training > Uploading > Completed | Failed
                                 |
                                 +> Interrupted > Starting > ...   the spot instance was reclaimed
             any > Stopping > Stopped | MaxRuntimeExceeded | MaxWaitTimeExceeded

SageMaker restarts an interrupted job under the same name when it finds a machine. In Archipelago
one job is one attempt, and the control plane decides where and when a replica is replaced. The
executor therefore stops an interrupted job that is not training again yet. The attempt ends as
PREEMPTED once SageMaker reports ``Stopped``: until then the job uses the account's quota, and its
replacement would be refused (``ResourceLimitExceeded``). A job that trains again before the next
poll continues.

Only ``Completed``, ``Failed`` and ``Stopped`` are final. Values are subject to change
(API_DescribeTrainingJob), so an unknown status counts as running or, before the first ``Training``,
as pending.

FailureReason is free text. These known forms are parsed:
``AlgorithmError: ..., exit code: 1``, ``CapacityError: ...``, ``InternalServerError: ...`` and
``ClientError: Please use an instance type with more memory, ...``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from executors.base import Cause, JobState, PendingCause, ReplicaStatus
from executors.launching import exit_cause

ENDED = ("Completed", "Failed", "Stopped")
_PENDING = (
    "",
    "Starting",
    "Pending",
    "Downloading",
    "LaunchingMLInstances",
    "PreparingTrainingStack",
    "DownloadingTrainingImage",
)
_EXIT_CODE = re.compile(r"exit code:?\s*(-?\d+)", re.IGNORECASE)
_NO_MEMORY = ("instance type with more memory", "Out of Memory. Please use a larger instance")
_NO_CAPACITY = "CapacityError"
_INTERNAL = ("InternalServerError",)


def of_description(job: Mapping[str, Any]) -> ReplicaStatus:
    """The status of a job from its description."""
    status, phase = str(job["TrainingJobStatus"]), str(job.get("SecondaryStatus", ""))
    started = _wall(job.get("TrainingStartTime"))
    if status not in ENDED:
        pending = phase in _PENDING and not _has_trained(job)
        run_s = job.get("StoppingCondition", {}).get("MaxRuntimeInSeconds")
        interrupted = "the spot instance was interrupted" if was_interrupted(job) else ""
        return ReplicaStatus(
            state=JobState.PENDING if pending else JobState.RUNNING,
            phase=phase,
            message=interrupted or (_message(job) if pending else ""),
            pending=_pending_cause(phase, job) if pending else None,
            started_wall_s=started,
            deadline_wall_s=started + run_s if started is not None and run_s else None,
        )
    cause, exit_code = _end(status, phase, job)
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=cause,
        exit_code=exit_code,
        message=str(job.get("FailureReason") or _explanation(cause, job)),
        phase=phase,
        started_wall_s=started,
        ended_wall_s=_wall(job.get("TrainingEndTime") or job.get("LastModifiedTime")),
        billed_s=job.get("BillableTimeInSeconds"),
    )


def _pending_cause(phase: str, job: Mapping[str, Any]) -> PendingCause:
    """``Pending`` waits for reserved capacity (API_StoppingCondition, MaxPendingTimeInSeconds).
    ``Starting`` with "Insufficient capacity error from EC2 while launching instances, retrying!"
    waits for a machine (API_SecondaryStatusTransition, StatusMessage). The messages are subject to
    change; an unknown message counts as a normal start, which has the same time limit."""
    waits = phase == "Pending" or "capacity" in _message(job).lower()
    return PendingCause.CAPACITY if waits else PendingCause.STARTING


def must_be_stopped(job: Mapping[str, Any]) -> bool:
    """Whether SageMaker would restart this job by itself."""
    return job["TrainingJobStatus"] == "InProgress" and was_interrupted(job)


def was_interrupted(job: Mapping[str, Any]) -> bool:
    """Whether the spot instance was reclaimed and the job has not trained since."""
    stages = [str(change["Status"]) for change in job.get("SecondaryStatusTransitions", ())]
    last = [stage for stage in stages if stage in ("Interrupted", "Training")][-1:]
    return last == ["Interrupted"] or job.get("SecondaryStatus") == "Interrupted"


def _end(status: str, phase: str, job: Mapping[str, Any]) -> tuple[Cause, int | None]:
    if status == "Completed":
        return Cause.DONE, 0
    if status == "Stopped":
        if phase == "MaxRuntimeExceeded":
            return Cause.DEADLINE, None
        if was_interrupted(job):
            return Cause.PREEMPTED, None
        if phase == "MaxWaitTimeExceeded":
            return Cause.DEADLINE if _has_trained(job) else Cause.PREEMPTED, None
        return Cause.CANCELLED, None
    reason = str(job.get("FailureReason", ""))
    match = _EXIT_CODE.search(reason)
    exit_code = int(match[1]) if match else None
    if reason.startswith(_NO_CAPACITY):
        return (
            Cause.PREEMPTED,
            exit_code,
        )  # no machine was available; retried, not counted as a failure
    if reason.startswith(_INTERNAL):
        return Cause.LOST, exit_code
    no_memory = any(text in reason for text in _NO_MEMORY)
    cause, _ = exit_cause(exit_code, out_of_memory=no_memory or None)
    return (Cause.ERROR if cause is Cause.DONE else cause), exit_code


def _has_trained(job: Mapping[str, Any]) -> bool:
    changes = job.get("SecondaryStatusTransitions", ())
    return any(change["Status"] == "Training" for change in changes)


def _explanation(cause: Cause, job: Mapping[str, Any]) -> str:
    if cause is Cause.PREEMPTED:
        if was_interrupted(job):
            return "the spot instance was interrupted"
        return "no spot instance became available within the maximum wait time"
    return "" if cause is Cause.DONE else _message(job)


def _message(job: Mapping[str, Any]) -> str:
    """SageMaker's message of the current stage, such as "Launching requested ML instances"."""
    changes = job.get("SecondaryStatusTransitions", ())
    return str(changes[-1].get("StatusMessage", "")) if changes else ""


def _wall(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment is not None else None
