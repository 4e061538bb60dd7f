"""Conversion of SageMaker's descriptions into statuses, and classification of errors."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    ReadTimeoutError,
)

from executors.base import (
    AccountError,
    Cause,
    JobState,
    LaunchRefused,
    NoCapacity,
    RetryLater,
)
from executors.sagemaker.client import classified
from executors.sagemaker.status import of_description

START = datetime(2026, 11, 1, 12, tzinfo=UTC)


def job(status: str, *stages: str, reason: str = "", **more: Any) -> dict[str, Any]:
    return {
        "TrainingJobStatus": status,
        "SecondaryStatus": stages[-1],
        "SecondaryStatusTransitions": [
            {"Status": stage, "StartTime": START, "StatusMessage": f"about {stage}"}
            for stage in stages
        ],
        "FailureReason": reason,
        "LastModifiedTime": START,
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        **more,
    }


NO_MEMORY = "ClientError: Please use an instance type with more memory, or reduce the size of job"


@pytest.mark.parametrize(
    ("described", "cause", "exit_code"),
    [
        (job("Completed", "Training", "Uploading", "Completed"), Cause.DONE, 0),
        (
            job("Failed", "Training", "Failed", reason="AlgorithmError: , exit code: 78"),
            Cause.ERROR,
            78,
        ),
        (
            job("Failed", "Training", "Failed", reason="AlgorithmError: Exit Code: 1"),
            Cause.ERROR,
            1,
        ),
        (
            job("Failed", "Training", "Failed", reason="AlgorithmError: , exit code: 137"),
            Cause.ERROR,
            137,
        ),  # SIGKILL is out of memory only where SageMaker reports so
        (
            job("Failed", "Training", "Failed", reason=f"{NO_MEMORY}, exit code: 137"),
            Cause.OUT_OF_MEMORY,
            137,
        ),
        (job("Failed", "Training", "Failed", reason=NO_MEMORY), Cause.OUT_OF_MEMORY, None),
        # No capacity: retried, and not counted as a failure of the replica.
        (
            job("Failed", "Starting", "Failed", reason="CapacityError: Unable to provision"),
            Cause.PREEMPTED,
            None,
        ),
        (
            job("Failed", "Training", "Failed", reason="InternalServerError: We encountered"),
            Cause.LOST,
            None,
        ),
        (
            job("Failed", "Starting", "Failed", reason="ClientError: Cannot find repository: x"),
            Cause.ERROR,
            None,
        ),
        (job("Stopped", "Training", "Stopping", "MaxRuntimeExceeded"), Cause.DEADLINE, None),
        (job("Stopped", "Training", "Stopping", "Stopped"), Cause.CANCELLED, None),
        (job("Stopped", "Starting", "Stopping", "Stopped"), Cause.CANCELLED, None),
        # Spot: no machine; interrupted without a new machine; interrupted, resumed, then out of
        # time.
        (job("Stopped", "Starting", "Stopping", "MaxWaitTimeExceeded"), Cause.PREEMPTED, None),
        (
            job(
                "Stopped", "Training", "Interrupted", "Starting", "Stopping", "MaxWaitTimeExceeded"
            ),
            Cause.PREEMPTED,
            None,
        ),
        (
            job(
                "Stopped",
                "Training",
                "Interrupted",
                "Starting",
                "Training",
                "Stopping",
                "MaxWaitTimeExceeded",
            ),
            Cause.DEADLINE,
            None,
        ),
        (job("Stopped", "Training", "Interrupted", "Stopping", "Stopped"), Cause.PREEMPTED, None),
        (
            job(
                "Stopped", "Training", "Interrupted", "Starting", "Training", "Stopping", "Stopped"
            ),
            Cause.CANCELLED,
            None,
        ),
    ],
)
def test_ends(described: dict[str, Any], cause: Cause, exit_code: int | None) -> None:
    status = of_description(described)
    assert (status.state, status.cause, status.exit_code) == (JobState.ENDED, cause, exit_code)
    assert status.message or cause is Cause.DONE


@pytest.mark.parametrize(
    ("described", "state"),
    [
        (job("InProgress", "Starting"), JobState.PENDING),
        (job("InProgress", "Starting", "Pending"), JobState.PENDING),
        (job("InProgress", "Starting", "Downloading"), JobState.PENDING),
        (job("InProgress", "Starting", "Downloading", "Training"), JobState.RUNNING),
        (job("InProgress", "Training", "Uploading"), JobState.RUNNING),
        (job("Stopping", "Training", "Stopping"), JobState.RUNNING),
        (job("InProgress", "Training", "Interrupted", "Starting", "Training"), JobState.RUNNING),
        # An interrupted job counts against the quota until it is Stopped.
        (job("InProgress", "Training", "Interrupted"), JobState.RUNNING),
        (job("InProgress", "Training", "Interrupted", "Starting", "Downloading"), JobState.RUNNING),
        (job("Stopping", "Training", "Interrupted", "Stopping"), JobState.RUNNING),
        (job("Stopping", "Starting", "Stopping"), JobState.RUNNING),
        # Unknown statuses are not ends.
        (job("Deleting", "Training", "Deleting"), JobState.RUNNING),
        (job("Suspended", "Starting", "Suspended"), JobState.RUNNING),
        (job("InProgress", "Starting", "Restarting"), JobState.RUNNING),
    ],
)
def test_states(described: dict[str, Any], state: JobState) -> None:
    status = of_description({**described, "TrainingStartTime": START})
    assert (status.state, status.cause) == (state, None)
    assert status.started_wall_s == START.timestamp()
    assert status.deadline_wall_s == START.timestamp() + 3600


def test_an_ended_job_reports_billed_seconds() -> None:
    done = job("Completed", "Training", "Completed", BillableTimeInSeconds=120)
    assert of_description(done).billed_s == 120
    assert of_description(job("Failed", "Starting", "Failed")).billed_s is None


LIMIT = (
    "The account-level service limit 'ml.g5.xlarge for training job usage' is {limit} Instances, "
    "with current utilization of {used} Instances and a request delta of 1 Instances."
)


def client_error(code: str, message: str = "a message", status: int = 400) -> ClientError:
    answer = {"HTTPStatusCode": status, "HTTPHeaders": {"retry-after": "7"}}
    error = {"Code": code, "Message": message}
    return ClientError({"Error": error, "ResponseMetadata": answer}, "CreateTrainingJob")  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (client_error("ThrottlingException"), RetryLater),
        (client_error("InternalFailure", status=500), RetryLater),
        (client_error("Whatever", status=503), RetryLater),
        (EndpointConnectionError(endpoint_url="https://x"), RetryLater),
        (ReadTimeoutError(endpoint_url="https://x"), RetryLater),
        (client_error("ResourceLimitExceeded", LIMIT.format(limit=0, used=0)), AccountError),
        (client_error("ResourceLimitExceeded", LIMIT.format(limit=2, used=2)), NoCapacity),
        (client_error("ResourceLimitExceeded"), NoCapacity),
        (client_error("ValidationException", "CapacityError: no machine"), NoCapacity),
        (client_error("AccessDeniedException"), AccountError),
        (client_error("UnrecognizedClientException"), AccountError),
        (client_error("ExpiredTokenException"), AccountError),
        (client_error("InvalidSignatureException"), AccountError),
        (client_error("Whatever", status=403), AccountError),
        (client_error("ValidationException", "Could not assume role arn:aws:x"), AccountError),
        (NoCredentialsError(), AccountError),
        (client_error("ValidationException"), LaunchRefused),
        (ParamValidationError(report="bad"), LaunchRefused),
    ],
)
def test_errors_are_classified(error: Any, kind: type) -> None:
    meant = classified(error)
    assert type(meant) is kind
    assert str(meant)
    if isinstance(error, ClientError):
        assert error.response["Error"]["Message"] in str(meant)
    if isinstance(meant, RetryLater) and isinstance(error, ClientError):
        assert meant.after_s == 7
