"""Every backend reports why a job has not started: a cause has a limit and a next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import JobInfo
from modal_proto import api_pb2 as api

from executors.base import JobState, PendingCause, ReplicaStatus
from executors.huggingface import status as hf_status
from executors.local import job as local_job
from executors.modal import status as modal_records
from executors.sagemaker import status as sagemaker_status

STARTING, CAPACITY = PendingCause.STARTING, PendingCause.CAPACITY


def sagemaker(phase: str, message: str) -> ReplicaStatus:
    return sagemaker_status.of_description(
        {
            "TrainingJobStatus": "InProgress",
            "SecondaryStatus": phase,
            "SecondaryStatusTransitions": [{"Status": phase, "StatusMessage": message}],
        }
    )


@pytest.mark.parametrize(
    ("phase", "message", "cause"),
    [
        ("Starting", "Launching requested ML instances", STARTING),
        (
            "Starting",
            "Insufficient capacity error from EC2 while launching instances, retrying!",
            CAPACITY,
        ),
        ("Starting", "Launched instance was unhealthy, replacing it!", STARTING),
        ("Pending", "", CAPACITY),
        ("Downloading", "Downloading the training image", STARTING),
    ],
)
def test_of_sagemaker(phase: str, message: str, cause: PendingCause) -> None:
    status = sagemaker(phase, message)
    assert (status.state, status.pending) == (JobState.PENDING, cause)


@pytest.mark.parametrize(
    ("stage", "message", "cause"),
    [
        ("SCHEDULING", None, STARTING),
        ("SCHEDULING", "No capacity for a100-large", CAPACITY),
        ("A_NEW_STAGE", None, STARTING),
    ],
)
def test_of_hugging_face(stage: str, message: str | None, cause: PendingCause) -> None:
    job: dict[str, Any] = {"id": "1", "owner": {"id": "2", "name": "a", "type": "user"}}
    status = hf_status.status_of(JobInfo(**job, status={"stage": stage, "message": message}))
    assert (status.state, status.pending) == (JobState.PENDING, cause)


@pytest.mark.parametrize(("task", "cause"), [("", CAPACITY), ("ta-1", STARTING)])
def test_of_modal(task: str, cause: PendingCause) -> None:
    record = api.SandboxInfo(id="sb-1", task_info=api.TaskInfo(id=task))
    status = modal_records.status_of(record)
    assert (status.state, status.pending) == (JobState.PENDING, cause)
    assert bool(status.message) is (cause is CAPACITY)


def test_of_a_local_job(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = local_job.status(tmp_path)
    assert (status.state, status.pending) == (JobState.PENDING, STARTING)


def test_a_running_job_has_no_cause() -> None:
    running = api.SandboxInfo(id="sb-1", task_info=api.TaskInfo(id="ta-1", started_at=1.0))
    assert modal_records.status_of(running).pending is None
    assert sagemaker("Training", "Training in progress").pending is None
