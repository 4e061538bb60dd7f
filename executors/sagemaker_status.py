"""How a training job is, out of what DescribeTrainingJob says.

Pure. The states are those of docs.aws.amazon.com/sagemaker/latest/APIReference/
API_DescribeTrainingJob.html, what a managed spot job goes through is in the developer guide under
"Managed Spot Training Lifecycle"::

    Starting > Downloading > Training > Uploading > Completed | Failed
                                 |
                                 +> Interrupted > Starting > ...   the spot instance was taken
             any > Stopping > Stopped | MaxRuntimeExceeded | MaxWaitTimeExceeded

SageMaker would start an interrupted job again by itself, under the same name, whenever it finds a
machine. For us one job is one attempt, and who replaces a replica decides where and when: a job
that was interrupted and has not started again has ended, PREEMPTED, and the executor stops it.
One that has started again before anybody looked simply runs.

FailureReason is text for people; what is read out of it here is what SageMaker is known to write:
``AlgorithmError: ..., exit code: 1``, ``CapacityError: ...``, ``InternalServerError: ...`` and
``ClientError: Please use an instance type with more memory, ...``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from executors.base import Cause, JobState, ReplicaStatus

ENDED = ("Completed", "Failed", "Stopped")
_RUNNING = ("Training", "Uploading", "Stopping")
_EXIT_CODE = re.compile(r"exit code:?\s*(-?\d+)", re.IGNORECASE)
_NO_MEMORY = ("instance type with more memory", "Out of Memory. Please use a larger instance")
_NOT_OURS = ("CapacityError", "InternalServerError")
KILLED = 137
"""128 + SIGKILL: in a container of its own, the kernel's work for want of memory."""


def is_running(phase: str) -> bool:
    """Whether a job with this SecondaryStatus has its machine and its program."""
    return phase in _RUNNING


def of_description(job: Mapping[str, Any]) -> ReplicaStatus:
    """Of any job, by what DescribeTrainingJob answers."""
    status, phase = str(job["TrainingJobStatus"]), str(job.get("SecondaryStatus", ""))
    started = _wall(job.get("TrainingStartTime"))
    if status not in ENDED:
        if was_interrupted(job):
            return _preempted(job, started=started)
        run_s = job.get("StoppingCondition", {}).get("MaxRuntimeInSeconds")
        return ReplicaStatus(
            state=JobState.RUNNING if is_running(phase) else JobState.PENDING,
            phase=phase,
            message="" if is_running(phase) else _message(job),
            started_wall_s=started,
            deadline_wall_s=started + run_s if started is not None and run_s else None,
        )
    cause, exit_code = _end(status, phase, job)
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=cause,
        exit_code=exit_code,
        message=str(job.get("FailureReason") or _words(cause, job)),
        phase=phase,
        started_wall_s=started,
        ended_wall_s=_wall(job.get("TrainingEndTime") or job.get("LastModifiedTime")),
        billed_s=job.get("BillableTimeInSeconds"),
    )


def was_interrupted(job: Mapping[str, Any]) -> bool:
    """Whether its spot instance was taken and it has not trained since."""
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
    found = _EXIT_CODE.search(reason)
    exit_code = int(found[1]) if found else None
    if any(words in reason for words in _NO_MEMORY) or exit_code == KILLED:
        return Cause.OUT_OF_MEMORY, exit_code
    if reason.startswith(_NOT_OURS):
        # SageMaker had no machine, or lost it: another attempt may find one.
        return Cause.LOST, exit_code
    return Cause.ERROR, exit_code


def _has_trained(job: Mapping[str, Any]) -> bool:
    changes = job.get("SecondaryStatusTransitions", ())
    return any(change["Status"] == "Training" for change in changes)


def _preempted(job: Mapping[str, Any], *, started: float | None) -> ReplicaStatus:
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=Cause.PREEMPTED,
        message="the spot instance was interrupted",
        phase=str(job.get("SecondaryStatus", "")),
        started_wall_s=started,
        ended_wall_s=_wall(job.get("LastModifiedTime")),
        billed_s=job.get("BillableTimeInSeconds"),
    )


def _words(cause: Cause, job: Mapping[str, Any]) -> str:
    if cause is Cause.PREEMPTED:
        if was_interrupted(job):
            return "the spot instance was interrupted"
        return "no spot instance became free in the time the job might wait"
    return "" if cause is Cause.DONE else _message(job)


def _message(job: Mapping[str, Any]) -> str:
    """SageMaker's own words for the stage ("Launching requested ML instances")."""
    changes = job.get("SecondaryStatusTransitions", ())
    return str(changes[-1].get("StatusMessage", "")) if changes else ""


def _wall(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment is not None else None
