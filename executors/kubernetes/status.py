"""Convert a Job and its pod into a :class:`~executors.base.ReplicaStatus`. Pure functions of JSON.

A Job has ended when its condition ``Complete`` or ``Failed`` is true; the pod and its container add
the exit code and a more precise cause while they exist. If the pod is gone with its node, the pod
failure policy of :mod:`executors.kubernetes.manifest` has recorded the cause and the exit code in
the Job's condition. The reason of a pending Job is in the pod or in a warning event. Unknown
conditions, phases and reasons are shown unchanged.

Message patterns are those of Kubernetes 1.28 to 1.37:
https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Any

from executors.base import AccountError, Cause, JobState, PendingCause, ReplicaStatus
from executors.kubernetes.client import quota_error
from executors.kubernetes.manifest import CANCELLED_ANNOTATION, COMPLETE_ANNOTATION, CONTAINER
from executors.kubernetes.options import QUEUE_LABEL
from executors.launching import exit_cause
from executors.options import Json

_DISRUPTED = "has condition DisruptionTarget"
_EXIT_CODE = re.compile(r"failed with exit code (\d+)")
_STARTING = ("ContainerCreating", "PodInitializing", "")
_IMAGE = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
"""https://kubernetes.io/docs/concepts/containers/images/#imagepullbackoff"""
_MISSING = re.compile(r"FailedMount: .*not found|CreateContainerConfigError")


def status(
    job: Json | None, pod: Json | None, warnings: Mapping[str, str] | None = None
) -> ReplicaStatus:
    """The status of one attempt. ``warnings``: warning events by the name of their object."""
    if job is None:
        return ReplicaStatus(
            state=JobState.ENDED,
            cause=Cause.LOST,
            message="the cluster has no such Job: deleted, or removed after its end",
        )
    end = ended(job)
    if end is not None:
        return _ended(job, end, pod)
    if pod is not None and _phase(pod) != "Pending":
        return _running(job, pod)
    # A queue suspends a Job that it preempts: once its pods are gone, the Job waits again.
    if _of(job, "status").get("terminating") or (_has_had_pods(job) and not is_suspended(job)):
        return ReplicaStatus(state=JobState.RUNNING, phase="Ending")
    phase, message, pending = waits_for(job, pod, warnings or {})
    return ReplicaStatus(state=JobState.PENDING, phase=phase, message=message, pending=pending)


def ended(job: Json) -> Json | None:
    """The final condition of a Job, or None if it has not ended."""
    for condition in _of(job, "status").get("conditions") or ():
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            return dict(condition)
    if is_cancelled(job) and _is_withdrawn(job):
        return {"type": "Failed", "reason": "Suspended", "message": "cancelled in its queue"}
    return None


def _is_withdrawn(job: Json) -> bool:
    """Whether the Job stays suspended in its queue and gets no more pods."""
    gets_pods = _of(job, "spec").get("parallelism") != 0
    return is_suspended(job) and QUEUE_LABEL in _labels(job) and not gets_pods


def is_suspended(job: Json) -> bool:
    return bool(_of(job, "spec").get("suspend"))


def is_complete(job: Json) -> bool:
    """Whether ``ensure`` has recorded that all objects of the attempt exist."""
    return COMPLETE_ANNOTATION in _annotations(job)


def is_cancelled(job: Json) -> bool:
    return CANCELLED_ANNOTATION in _annotations(job)


def waits_for(
    job: Json, pod: Json | None, warnings: Mapping[str, str]
) -> tuple[str, str, PendingCause]:
    """Why a Job has not started: the cluster's reason, its message (both can be empty), and the
    kind of cause."""
    if is_suspended(job):
        return _suspension(job)
    if pod is None:
        warning = warnings.get(_name(job), "")
        if not warning:
            return "Pending", "", PendingCause.STARTING
        return warning.partition(":")[0], warning, _refusal(warning)
    for condition in _of(pod, "status").get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason") or "Pending"
            # The controller that set a gate removes it, e.g. Kueue.
            gated = reason == "SchedulingGated"
            cause = PendingCause.QUEUED if gated else PendingCause.CAPACITY
            return reason, condition.get("message") or "", cause
    waiting = _container(pod).get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _STARTING:
        warning = warnings.get(_name(pod), "")
        missing = _MISSING.search(warning)
        cause = PendingCause.INCOMPLETE if missing else PendingCause.STARTING
        return reason or "Pending", warning, cause
    return reason, message or reason, _waiting_cause(reason)


def _waiting_cause(reason: str) -> PendingCause:
    if reason in _IMAGE:
        return PendingCause.IMAGE
    if reason == "CreateContainerConfigError":
        return PendingCause.INCOMPLETE
    if reason in ("CreateContainerError", "RunContainerError"):
        return PendingCause.REFUSED
    return PendingCause.STARTING


def _suspension(job: Json) -> tuple[str, str, PendingCause]:
    if is_cancelled(job):
        return "Ending", "cancelled before it started", PendingCause.STARTING
    if not is_complete(job):
        return "Incomplete", "its Secret does not exist yet", PendingCause.INCOMPLETE
    queue = _labels(job).get(QUEUE_LABEL)
    if queue:
        return (
            "Suspended (waiting for admission)",
            f"queue {queue} has not admitted it",
            PendingCause.QUEUED,
        )
    return "Suspended", "suspended by a user or a controller of the cluster", PendingCause.QUEUED


def _refusal(warning: str) -> PendingCause:
    """Classify a warning about a Job without a pod (``FailedCreate``)."""
    if "exceeded quota" not in warning:
        return PendingCause.REFUSED
    if isinstance(quota_error(warning), AccountError):
        return PendingCause.REFUSED
    return PendingCause.QUOTA


def newest(pods: Iterable[Json]) -> Json | None:
    """The newest pod of a Job. There is only one unless a user interfered."""
    return max(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""), default=None)


def seconds(timestamp: str | None) -> float | None:
    """RFC 3339 as Unix seconds."""
    return datetime.datetime.fromisoformat(timestamp).timestamp() if timestamp else None


def _running(job: Json, pod: Json) -> ReplicaStatus:
    # The pod can end before the Job's condition is set, which decides.
    is_ending = _phase(pod) in ("Succeeded", "Failed") or "deletionTimestamp" in pod["metadata"]
    started = seconds(_of(pod, "status").get("startTime"))
    limit_s = _of(pod, "spec").get("activeDeadlineSeconds")
    return ReplicaStatus(
        state=JobState.RUNNING,
        phase="Ending" if is_ending or is_cancelled(job) else "Running",
        started_wall_s=_started(pod),
        deadline_wall_s=None if started is None or limit_s is None else started + limit_s,
    )


def _ended(job: Json, end: Json, pod: Json | None) -> ReplicaStatus:
    terminated = _container(pod).get("state", {}).get("terminated") or {} if pod else {}
    exit_code = terminated.get("exitCode")
    if end["type"] == "Complete":
        cause, message = Cause.DONE, ""
        exit_code = 0
    else:
        match = _EXIT_CODE.search(end.get("message", ""))
        if exit_code is None and match:
            exit_code = int(match[1])
        cause, message = _cause(job, end, pod, terminated, exit_code)
    finished = terminated.get("finishedAt") or _of(job, "status").get("completionTime")
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=cause,
        exit_code=exit_code,
        message=message,
        phase=end.get("reason", ""),
        started_wall_s=_started(pod) if pod else None,
        ended_wall_s=seconds(finished or end.get("lastTransitionTime")),
    )


def _cause(
    job: Json, end: Json, pod: Json | None, terminated: Json, exit_code: int | None
) -> tuple[Cause, str]:
    message = end.get("message", "")
    if end.get("reason") in ("DeadlineExceeded", "Suspended"):
        if is_cancelled(job):
            return Cause.CANCELLED, "cancelled"
        return Cause.DEADLINE, message
    of_pod = _of(pod, "status") if pod else {}
    pod_reason, pod_message = of_pod.get("reason", ""), of_pod.get("message", "")
    if terminated.get("reason") == "OOMKilled":
        cause, how = exit_cause(exit_code, out_of_memory=True)
        return cause, f"OOMKilled: {how}"
    if pod_reason == "Evicted" and "low on resource: memory" in pod_message:
        return Cause.OUT_OF_MEMORY, f"Evicted: {pod_message}"
    disrupted = _disruption(of_pod)
    if disrupted is not None:
        return Cause.PREEMPTED, ": ".join(
            text for text in (disrupted.get("reason"), disrupted.get("message")) if text
        )
    if _DISRUPTED in message:
        return Cause.PREEMPTED, message
    if pod_reason == "DeadlineExceeded":
        return Cause.DEADLINE, pod_message
    if pod_reason:
        return Cause.ERROR, f"{pod_reason}: {pod_message}"
    if exit_code is None:
        return Cause.ERROR, message
    # The kubelet reports OOMKilled for the container's first process only.
    cause, how = exit_cause(exit_code)
    last_lines = terminated.get("message", "").strip()
    return cause, how + (f". Last lines of its log:\n{last_lines}" if last_lines else "")


def _disruption(of_pod: Json) -> Json | None:
    for condition in of_pod.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return dict(condition)
    return None


def _started(pod: Json) -> float | None:
    state = _container(pod).get("state", {})
    started_at = (state.get("running") or state.get("terminated") or {}).get("startedAt")
    return seconds(started_at or _of(pod, "status").get("startTime"))


def _has_had_pods(job: Json) -> bool:
    of_job = _of(job, "status")
    uncounted = of_job.get("uncountedTerminatedPods") or {}
    return any(of_job.get(count) for count in ("failed", "succeeded", "terminating")) or any(
        uncounted.values()
    )


def _annotations(job: Json) -> Json:
    return job["metadata"].get("annotations") or {}


def _labels(job: Json) -> Json:
    return job["metadata"].get("labels") or {}


def _container(pod: Json) -> Json:
    for status_ in _of(pod, "status").get("containerStatuses") or ():
        if status_.get("name") == CONTAINER:
            return dict(status_)
    return {}


def _phase(pod: Json) -> str:
    return str(_of(pod, "status").get("phase", "Pending"))


def _name(resource: Json) -> str:
    return str(resource["metadata"]["name"])


def _of(resource: Mapping[str, Any], part: str) -> Json:
    return resource.get(part) or {}
