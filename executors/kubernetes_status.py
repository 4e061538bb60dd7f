"""How a Job stands, read from what the cluster says of it. Pure functions of its JSON.

A Job's end is its own condition ``Complete`` or ``Failed``; the pod and its container add the exit
code and the finer cause while they exist. The pod may be gone (its node was): the pod failure
policy of :mod:`executors.kubernetes_manifest` has then left the cause and the exit code in the
Job's condition. What a pending Job waits for stands in the pod, or in a warning of the cluster.

The texts that are searched for here are those of Kubernetes 1.28 to 1.37:
https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Any

from executors.base import Cause, JobState, ReplicaStatus
from executors.kubernetes_manifest import CANCELLED_ANNOTATION, CONTAINER
from executors.kubernetes_options import Json

_DISRUPTED = "has condition DisruptionTarget"
_EXIT_CODE = re.compile(r"failed with exit code (\d+)")
_STARTING = ("ContainerCreating", "PodInitializing", "")
_SIGKILL = 128 + 9


def status(
    job: Json | None, pod: Json | None, warnings: Mapping[str, str] | None = None
) -> ReplicaStatus:
    """The state of one attempt. ``warnings``: what the cluster complains of, by the name of the
    object it is about."""
    if job is None:
        return ReplicaStatus(
            state=JobState.ENDED,
            cause=Cause.LOST,
            message="the cluster knows no such Job: deleted, or cleared away after its end",
        )
    end = ended(job)
    if end is not None:
        return _ended(job, end, pod)
    if pod is not None and _phase(pod) != "Pending":
        return _running(job, pod)
    if _has_had_pods(job):
        return ReplicaStatus(state=JobState.RUNNING, phase="Ending")
    phase, message = waits_for(job, pod, warnings or {})
    return ReplicaStatus(state=JobState.PENDING, phase=phase, message=message)


def ended(job: Json) -> Json | None:
    """The condition that a Job has ended by, or None while it goes on."""
    for condition in _of(job, "status").get("conditions") or ():
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            return dict(condition)
    if _is_cancelled(job) and _of(job, "spec").get("suspend") and not _has_had_pods(job):
        # Its deadline does not run while it is suspended, and it has no pods.
        return {"type": "Failed", "reason": "Suspended", "message": "cancelled while suspended"}
    return None


def waits_for(job: Json, pod: Json | None, warnings: Mapping[str, str]) -> tuple[str, str]:
    """Why a Job has not begun: the cluster's word for it, and what it says; both may be empty."""
    if _of(job, "spec").get("suspend"):
        return "Suspended", "suspended by a queue of the cluster, or by somebody"
    if pod is None:
        return "Pending", warnings.get(_name(job), "")
    for condition in _of(pod, "status").get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return condition.get("reason", "Pending"), condition.get("message", "")
    waiting = _container(pod).get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _STARTING:
        return reason or "Pending", warnings.get(_name(pod), "")
    return reason, message or reason


def newest(pods: Iterable[Json]) -> Json | None:
    """The last made of a Job's pods; there is only one unless somebody interfered."""
    return max(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", ""), default=None)


def seconds(timestamp: str | None) -> float | None:
    """RFC 3339 as Unix seconds."""
    return datetime.datetime.fromisoformat(timestamp).timestamp() if timestamp else None


def _running(job: Json, pod: Json) -> ReplicaStatus:
    # The Job's own word is awaited: the pod's end may be seen before it.
    over = _phase(pod) in ("Succeeded", "Failed") or "deletionTimestamp" in pod["metadata"]
    started = seconds(_of(pod, "status").get("startTime"))
    limit_s = _of(pod, "spec").get("activeDeadlineSeconds")
    return ReplicaStatus(
        state=JobState.RUNNING,
        phase="Ending" if over or _is_cancelled(job) else "Running",
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
        said = _EXIT_CODE.search(end.get("message", ""))
        if exit_code is None and said:
            exit_code = int(said[1])
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
    said = end.get("message", "")
    if end.get("reason") in ("DeadlineExceeded", "Suspended"):
        if _is_cancelled(job):
            return Cause.CANCELLED, "cancelled"
        return Cause.DEADLINE, said
    of_pod = _of(pod, "status") if pod else {}
    pod_reason, pod_message = of_pod.get("reason", ""), of_pod.get("message", "")
    if terminated.get("reason") == "OOMKilled":
        return Cause.OUT_OF_MEMORY, "OOMKilled: it used more memory than its limit, or its node had"
    if pod_reason == "Evicted" and "low on resource: memory" in pod_message:
        return Cause.OUT_OF_MEMORY, f"Evicted: {pod_message}"
    disrupted = _disruption(of_pod)
    if disrupted is not None:
        return Cause.PREEMPTED, ": ".join(
            text for text in (disrupted.get("reason"), disrupted.get("message")) if text
        )
    if _DISRUPTED in said:
        return Cause.PREEMPTED, said
    if pod_reason == "DeadlineExceeded":
        return Cause.DEADLINE, pod_message
    if pod_reason:
        return Cause.ERROR, f"{pod_reason}: {pod_message}"
    if exit_code is None:
        return Cause.ERROR, said
    return Cause.ERROR, _how(exit_code, terminated.get("message", ""))


def _how(exit_code: int, last_lines: str) -> str:
    how = f"ended with exit code {exit_code}"
    if exit_code == _SIGKILL:
        how += " (killed by SIGKILL: by somebody, or for want of memory in a process it started)"
    last_lines = last_lines.strip()
    return how + (f". Last lines of its log:\n{last_lines}" if last_lines else "")


def _disruption(of_pod: Json) -> Json | None:
    for condition in of_pod.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return dict(condition)
    return None


def _started(pod: Json) -> float | None:
    state = _container(pod).get("state", {})
    began = (state.get("running") or state.get("terminated") or {}).get("startedAt")
    return seconds(began or _of(pod, "status").get("startTime"))


def _has_had_pods(job: Json) -> bool:
    of_job = _of(job, "status")
    uncounted = of_job.get("uncountedTerminatedPods") or {}
    return any(of_job.get(count) for count in ("failed", "succeeded", "terminating")) or any(
        uncounted.values()
    )


def _is_cancelled(job: Json) -> bool:
    return CANCELLED_ANNOTATION in (job["metadata"].get("annotations") or {})


def _container(pod: Json) -> Json:
    for found in _of(pod, "status").get("containerStatuses") or ():
        if found.get("name") == CONTAINER:
            return dict(found)
    return {}


def _phase(pod: Json) -> str:
    return str(_of(pod, "status").get("phase", "Pending"))


def _name(made: Json) -> str:
    return str(made["metadata"]["name"])


def _of(made: Mapping[str, Any], part: str) -> Json:
    return made.get(part) or {}
