"""Statuses of Jobs and pods, with Kubernetes' messages for each end and each pending cause."""

from __future__ import annotations

from typing import Any

import pytest

from executors.base import Cause, JobState
from executors.kubernetes.status import newest, status

AT = "2026-11-21T10:00:00Z"
LATER = "2026-11-21T10:05:00Z"
AT_S = 1_795_255_200.0


def job(
    end: str = "", reason: str = "", message: str = "", *, cancelled: bool = False, **given: Any
) -> dict[str, Any]:
    conditions = [{"type": "FailureTarget", "status": "True"}] if end == "Failed" else []
    if end:
        conditions += [
            {"type": end, "status": "True", "reason": reason, "message": message}
            | {"lastTransitionTime": LATER}
        ]
    annotations = {"archipelago-key": "run-0-1", "archipelago-complete": "true"}
    if cancelled:
        annotations["archipelago-cancelled"] = "true"
    return {
        "metadata": {
            "name": "run-0-1-x",
            "annotations": annotations,
            "labels": given.pop("labels", {}),
            "creationTimestamp": AT,
        },
        "spec": given.pop("spec", {}),
        "status": {"conditions": conditions, **given},
    }


def pod(
    phase: str = "Failed", *, spec: dict[str, Any] | None = None, **given: Any
) -> dict[str, Any]:
    result: dict[str, Any] = {"phase": phase, "startTime": AT}
    state = given.pop("state", None)
    if state is not None:
        result["containerStatuses"] = [
            {"name": "sidecar", "state": {"terminated": {"exitCode": 9}}},
            {"name": "replica", "state": state},
        ]
    return {
        "metadata": {"name": "run-0-1-x-abcde", "creationTimestamp": AT},
        "spec": spec or {},
        "status": result | given,
    }


def terminated(exit_code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {
        "terminated": {"exitCode": exit_code, "reason": reason, "message": message}
        | {"startedAt": AT, "finishedAt": LATER}
    }


def disrupted(reason: str, message: str = "") -> list[dict[str, str]]:
    return [
        {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message},
        {"type": "Ready", "status": "False"},
    ]


def policy(exit_code: int) -> str:
    return (
        f"Container replica for pod ns/run-0-1-x-abcde failed with exit code {exit_code} "
        "matching FailJob rule at index 1"
    )


QUEUE = {"kueue.x-k8s.io/queue-name": "research"}
TAKEN = "Pod ns/run-0-1-x-abcde has condition DisruptionTarget matching FailJob rule at index 0"
PAST = "Job was active longer than specified deadline"
LOW = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi. "
FULL = 'Usage of EmptyDir volume "data" exceeds the limit "1Gi". '


@pytest.mark.parametrize(
    ("of_job", "of_pod", "cause", "exit_code", "text"),
    [
        (job("Complete"), pod("Succeeded", state=terminated(0)), Cause.DONE, 0, ""),
        (job("Complete"), None, Cause.DONE, 0, ""),
        # Cancelled, but done before it ended.
        (job("Complete", cancelled=True), None, Cause.DONE, 0, ""),
        (
            job("Failed", "PodFailurePolicy", policy(3)),
            pod(state=terminated(3, message="Traceback\nValueError: no\n")),
            Cause.ERROR,
            3,
            "ended with exit code 3. Last lines of its log:\nTraceback\nValueError: no",
        ),
        # The node and the pod are gone; the Job has recorded the cause.
        (
            job("Failed", "PodFailurePolicy", policy(78)),
            None,
            Cause.ERROR,
            78,
            "ended with exit code 78",
        ),
        (job("Failed", "PodFailurePolicy", TAKEN), None, Cause.PREEMPTED, None, TAKEN),
        (
            job("Failed", "PodFailurePolicy", TAKEN),
            pod(state=terminated(143), conditions=disrupted("DeletionByTaintManager", "bye")),
            Cause.PREEMPTED,
            143,
            "DeletionByTaintManager: bye",
        ),
        (
            job("Failed", "PodFailurePolicy", policy(137)),
            pod(state=terminated(137, "OOMKilled")),
            Cause.OUT_OF_MEMORY,
            137,
            "OOMKilled",
        ),
        (
            job("Failed", "PodFailurePolicy", policy(137)),
            pod(state=terminated(137)),
            Cause.ERROR,
            137,
            "killed with SIGKILL",
        ),
        # The kubelet calls both of these Evicted; only one of them is about the node.
        (
            job("Failed", "PodFailurePolicy", TAKEN),
            pod(reason="Evicted", message=LOW, conditions=disrupted("TerminationByKubelet")),
            Cause.OUT_OF_MEMORY,
            None,
            "Evicted: The node was low on resource: memory.",
        ),
        (
            job("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"),
            pod(reason="Evicted", message=FULL),
            Cause.ERROR,
            None,
            "Evicted: Usage of EmptyDir",
        ),
        (
            job("Failed", "PodFailurePolicy", policy(143)),
            pod(reason="DeadlineExceeded", message="Pod was active", state=terminated(143)),
            Cause.DEADLINE,
            143,
            "Pod was active",
        ),
        (job("Failed", "DeadlineExceeded", PAST), None, Cause.DEADLINE, None, PAST),
        (
            job("Failed", "DeadlineExceeded", PAST, cancelled=True),
            pod(state=terminated(143)),
            Cause.CANCELLED,
            143,
            "cancelled",
        ),
        # It failed before the cancellation took effect.
        (
            job("Failed", "PodFailurePolicy", policy(1), cancelled=True),
            pod(state=terminated(1)),
            Cause.ERROR,
            1,
            "ended with exit code 1",
        ),
        (
            job("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"),
            None,
            Cause.ERROR,
            None,
            "backoff limit",
        ),
        # Suspended in its queue without pods.
        (
            job(cancelled=True, spec={"suspend": True, "parallelism": 0}, labels=QUEUE),
            None,
            Cause.CANCELLED,
            None,
            "cancelled",
        ),
        (None, None, Cause.LOST, None, "has no such Job"),
    ],
)
def test_ends(
    of_job: dict[str, Any] | None,
    of_pod: dict[str, Any] | None,
    cause: Cause,
    exit_code: int | None,
    text: str,
) -> None:
    seen = status(of_job, of_pod)
    assert (seen.state, seen.cause, seen.exit_code) == (JobState.ENDED, cause, exit_code)
    assert text in seen.message and bool(text) == bool(seen.message)
    if of_job is not None and of_job["status"]["conditions"]:
        assert seen.ended_wall_s == AT_S + 300


RUNNING = {"running": {"startedAt": "2026-11-21T10:00:30Z"}}


def test_running() -> None:
    seen = status(job(active=1), pod("Running", state=RUNNING))
    assert (seen.state, seen.phase) == (JobState.RUNNING, "Running")
    assert (seen.started_wall_s, seen.deadline_wall_s) == (AT_S + 30, None)
    seen = status(job(), pod("Running", state=RUNNING, spec={"activeDeadlineSeconds": 600}))
    assert seen.deadline_wall_s == AT_S + 600


@pytest.mark.parametrize(
    ("of_job", "of_pod"),
    [
        # The pod has ended before the Job's condition is set.
        (job(), pod("Failed", state=terminated(1))),
        (job(), pod("Succeeded", state=terminated(0))),
        (job(cancelled=True), pod("Running", state=RUNNING)),
        (job(failed=1), None),
        (job(uncountedTerminatedPods={"failed": ["b7f0"]}), None),
        (job(spec={"suspend": True}, cancelled=True, terminating=1), None),
    ],
)
def test_ending_is_not_ended(of_job: dict[str, Any], of_pod: dict[str, Any] | None) -> None:
    seen = status(of_job, of_pod)
    assert (seen.state, seen.cause, seen.phase) == (JobState.RUNNING, None, "Ending")


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason} | ({"message": message} if message else {})}


NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
UNSCHEDULED = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_ROOM}
]
PULL = 'Back-off pulling image "replica:9": not found'


@pytest.mark.parametrize(
    ("of_job", "of_pod", "warnings", "phase", "text"),
    [
        (job(), None, {}, "Pending", ""),
        (job(), None, {"run-0-1-x": "FailedCreate: quota"}, "FailedCreate", "quota"),
        (job(spec={"suspend": True}), None, {}, "Suspended", "by a user or a controller"),
        (job(), pod("Pending", conditions=UNSCHEDULED), {}, "Unschedulable", NO_ROOM),
        (job(), pod("Pending", state=waiting("ContainerCreating")), {}, "ContainerCreating", ""),
        (
            job(),
            pod("Pending", state=waiting("ContainerCreating")),
            {"run-0-1-x-abcde": "FailedMount: no such volume", "other": "FailedMount: other"},
            "ContainerCreating",
            "FailedMount: no such volume",
        ),
        (
            job(),
            pod("Pending", state=waiting("ImagePullBackOff", PULL)),
            {},
            "ImagePullBackOff",
            PULL,
        ),
        (job(), pod("Pending", state=waiting("InvalidImageName")), {}, "InvalidImageName", "Inval"),
    ],
)
def test_pending_jobs_have_a_cause(
    of_job: dict[str, Any],
    of_pod: dict[str, Any] | None,
    warnings: dict[str, str],
    phase: str,
    text: str,
) -> None:
    seen = status(of_job, of_pod, warnings)
    assert (seen.state, seen.cause, seen.phase) == (JobState.PENDING, None, phase)
    assert text in seen.message and bool(text) == bool(seen.message)


def test_of_several_pods_the_newest_counts() -> None:
    old, new = pod(), pod("Running")
    new["metadata"]["creationTimestamp"] = LATER
    assert newest([new, old]) is new
    assert newest([]) is None
