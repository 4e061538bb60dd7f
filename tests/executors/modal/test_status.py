"""Conversion of Modal's records into statuses, for each result."""

from __future__ import annotations

from typing import Any

import pytest
from modal_proto import api_pb2 as api

from executors.base import Cause, JobState
from executors.modal.status import CANCELLED_TAG, status_of

Status = api.GenericResult


def record(
    status: int = 0,
    *,
    exitcode: int = 0,
    exception: str = "",
    started: float = 100.0,
    tags: tuple[str, ...] = (),
    in_metadata: bool = False,
    **fields: Any,
) -> api.SandboxInfo:
    result = Status(status=status, exitcode=exitcode, exception=exception)  # type: ignore[arg-type]
    return api.SandboxInfo(
        id="sb-1",
        created_at=90,
        timeout_secs=3600,
        tags=[api.SandboxTag(tag_name=tag, tag_value="yes") for tag in tags],
        task_info=api.TaskInfo(
            started_at=started, finished_at=150, result=None if in_metadata else result
        ),
        metadata=api.SandboxHandleMetadata(result=result if in_metadata else None),
        **fields,
    )


@pytest.mark.parametrize(
    ("status", "exitcode", "cause", "code"),
    [
        (Status.GENERIC_STATUS_SUCCESS, 0, Cause.DONE, 0),
        (Status.GENERIC_STATUS_SUCCESS, 3, Cause.ERROR, 3),
        (Status.GENERIC_STATUS_FAILURE, 78, Cause.ERROR, 78),
        (Status.GENERIC_STATUS_FAILURE, 0, Cause.ERROR, 0),
        (Status.GENERIC_STATUS_FAILURE, 124, Cause.ERROR, 124),
        (Status.GENERIC_STATUS_FAILURE, 137, Cause.ERROR, 137),
        (Status.GENERIC_STATUS_KERNEL_OOM_KILL, 137, Cause.OUT_OF_MEMORY, 137),
        (Status.GENERIC_STATUS_MEMORY_MANAGER_EVICTION, 0, Cause.OUT_OF_MEMORY, None),
        (Status.GENERIC_STATUS_MEMORY_THRASHING_EVICTION, 0, Cause.OUT_OF_MEMORY, None),
        (Status.GENERIC_STATUS_TIMEOUT, 0, Cause.DEADLINE, 124),
        (Status.GENERIC_STATUS_TERMINATED, -1, Cause.PREEMPTED, -1),
        (Status.GENERIC_STATUS_INTERNAL_FAILURE, 0, Cause.PREEMPTED, None),
        (Status.GENERIC_STATUS_INIT_FAILURE, 0, Cause.ERROR, None),
        (Status.GENERIC_STATUS_IDLE_TIMEOUT, 0, Cause.ERROR, None),
    ],
)
@pytest.mark.parametrize("in_metadata", [False, True])
def test_every_end_has_a_cause(
    status: int, exitcode: int, cause: Cause, code: int | None, in_metadata: bool
) -> None:
    result = status_of(record(status, exitcode=exitcode, in_metadata=in_metadata))
    assert (result.state, result.cause, result.exit_code) == (JobState.ENDED, cause, code)
    assert result.message or cause is Cause.DONE
    assert (result.started_wall_s, result.ended_wall_s) == (100.0, 150.0)


def test_modals_message_is_kept() -> None:
    result = status_of(record(Status.GENERIC_STATUS_INIT_FAILURE, exception="no such bucket"))
    assert "no such bucket" in result.message
    assert result.phase == "INIT_FAILURE"


def test_only_a_termination_can_be_a_cancellation() -> None:
    ours = record(Status.GENERIC_STATUS_TERMINATED, exitcode=-1, tags=(CANCELLED_TAG,))
    assert (status_of(ours).cause, status_of(ours).exit_code) == (Cause.CANCELLED, 137)
    for status, cause in (
        (Status.GENERIC_STATUS_SUCCESS, Cause.DONE),
        (Status.GENERIC_STATUS_TIMEOUT, Cause.DEADLINE),
    ):
        assert status_of(record(status, tags=(CANCELLED_TAG,))).cause is cause


def test_a_status_has_start_and_end_times() -> None:
    waiting, running = status_of(record(started=0.0)), status_of(record())
    assert (waiting.state, waiting.phase, waiting.deadline_wall_s) == (
        JobState.PENDING,
        "scheduling",
        None,
    )
    assert (running.state, running.started_wall_s, running.deadline_wall_s) == (
        JobState.RUNNING,
        100.0,
        3700.0,
    )
    assert running.ended_wall_s is None
